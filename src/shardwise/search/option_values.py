"""Values of options of ``shardwise plan``: numbers, choices, and the program whose costs are predicted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from shardwise.cost.link_calibration import CalibrationFile, covers
from shardwise.cost.time.kernels import known, supports
from shardwise.errors import PlanError, UserError, did_you_mean
from shardwise.hardware.cluster import ClusterSpec
from shardwise.model.profile import ModelProfile
from shardwise.plan.fp8_recipes import RECIPES, refused
from shardwise.plan.objective import OBJECTIVES
from shardwise.plan.optimizers import OPTIMIZERS
from shardwise.plan.plan import LAYERS_IDLE, Plan, Precision, Recompute, saved_problems, type_problems
from shardwise.plan.program import OWN, ProgramTraits, find_program, program_table
from shardwise.plan.strategy import parse_strategy
from shardwise.plan.tensor_types import Fp8Recipe, GradientType, Rounding, WeightType
from shardwise.search.problem import default_precision, unknown_links
from shardwise.units import counted

LOSSES = ("plain", "fused")
LONGEST = 2**27
MOST_LAYERS, ALL_LAYERS = 2**16, "all"
MOST_TOKENS = 1e18
TYPES: dict[str, Any] = {
    "weights": WeightType,
    "accumulate": GradientType,
    "reduce": GradientType,
    "rounding": Rounding,
    "fp8": Fp8Recipe,
}


def program_of(words: Mapping[str, Any], cluster: ClusterSpec | None) -> ProgramTraits:
    """Return the program's traits with the types that the options name.

    Raises:
        PlanError: the program is unknown, or the types contradict each other or the precision.
    """
    problems: list[str] = []
    stages = words["virtual_stages"]
    if stages > 1 and words["strategy"] is not None and "+pp" not in words["strategy"]:
        problems.append(f"--virtual-stages {stages} does nothing without +pp; remove it")
    try:
        program = find_program(words["program"])
    except PlanError as error:
        raise PlanError(*problems, *error.problems) from None
    given = {name: words[name] for name in TYPES if words[name] is not None}
    if any(value not in get_args(TYPES[name]) for name, value in given.items()):
        given = {}  # `bad_choices` says so
    if given:
        program = program.model_copy(update=given)
        if program.weights != "masters" and "accumulate" not in given:
            program = program.model_copy(update={"accumulate": "fp32"})
        precision = words["precision"] or ("bf16" if cluster is None else default_precision(cluster))
        if precision in get_args(Precision):
            types = {name: getattr(program, name) for name in TYPES}
            problems += [f"--{line}" for line in type_problems(Plan.model_validate({"precision": precision} | types))]
    problems += _fp8_problems(program, cluster)
    if problems:
        raise PlanError(*problems)
    return program


def _fp8_problems(program: ProgramTraits, cluster: ClusterSpec | None) -> list[str]:
    """Return why a program has no such recipe, or the cluster's GPUs no fp8 products."""
    asked, gpu = f"--fp8 {program.fp8}", None if cluster is None else cluster.gpu
    if program.fp8 not in RECIPES:
        return []
    if not program.is_own and (program.modules != "torchtitan" or program.fused_kernels):
        return [f"{asked} is torchao's, and --program {program.name} has its own fp8; take --precision fp8 for that"]
    if gpu is not None and not supports(gpu, "fp8"):
        return [f"{asked}: {gpu.name} has no fp8 products; leave it out, or name GPUs that have (Ada, Hopper, newer)"]
    if gpu is not None and not known(gpu, "fp8"):
        return [f"{asked}: the rate of fp8 products of {gpu.name} is unknown, so nothing is predicted; leave it out"]
    return []


def about_program(program: ProgramTraits, text: str) -> list[str]:
    """Say whose costs are predicted."""
    if program.is_own:
        return []
    about = program_table().get(text, {}).get("about", f"the traits of {text}")
    return [f"--program {text}: costs are those of {about}; train runs this package's own program"]


def about_nodes(cluster: ClusterSpec) -> list[str]:
    """Say where NVLink is taken to end, if GPUs that it joins across hosts are given by the host."""
    gpu, inside = cluster.gpu, cluster.devices_per_node
    most = None if gpu is None else gpu.devices_per_node
    if gpu is None or most is None or most <= 8 or cluster.nodes == 1 or inside >= 8:
        return []
    fit = next(n for n in range(most, 0, -1) if cluster.world_size % n == 0)
    return [
        f"--cluster: a node is what NVLink joins, here {inside} GPUs, and {gpu.name} has it over up to {most}; for "
        f"racks write {cluster.world_size // fit}x{fit}x{gpu.name}"
    ]


def bad_choices(words: Mapping[str, Any]) -> list[str]:
    """List each choice among known words that is none of them."""
    why = refused(words["fp8"])
    choices: list[tuple[str, str | None, tuple[str, ...]]] = [
        ("--recompute", words["recompute"], get_args(Recompute)),
        ("--precision", words["precision"], get_args(Precision)),
        ("--optimizer", words["optimizer"], tuple(OPTIMIZERS)),
        ("--loss", words["loss"], LOSSES),
        ("--objective", words["objective"], OBJECTIVES),
        ("--framework-overhead", words["framework_overhead"], ("on", "off")),
        *((f"--{name}", words[name], get_args(TYPES[name])) for name in TYPES if not (name == "fp8" and why)),
    ]
    return choice_problems(choices) + ([f"--fp8 {why}"] if why else [])


def offload_problems(words: Mapping[str, Any], strategy: str | None) -> list[str]:
    """List why activations cannot be kept in host memory beside the other options."""
    if not words.get("offload_activations") or words["program"] != OWN:
        return []
    facts = {"strategy": strategy or "fsdp", "compile": words["compiled"], "offload_activations": True}
    recompute = words["recompute"] if words["recompute"] in get_args(Recompute) else None
    plan = Plan.model_validate(facts | {"recompute": recompute or "none"})
    return [f"--{line.replace('offload_activations = true', 'offload-activations')}" for line in saved_problems(plan)]


def layer_problems(words: Mapping[str, Any], profile: ModelProfile | None) -> list[str]:
    """List why so many blocks cannot be recomputed."""
    asked = words.get("recompute_layers")
    if asked is None:
        return []
    if words["recompute"] == "none":
        return [f"--recompute-layers {asked}: {LAYERS_IDLE.partition('; ')[2]}"]
    if profile is None or asked == ALL_LAYERS or asked <= profile.num_blocks:
        return []
    most = counted(profile.num_blocks, "block")
    return [
        f"--recompute-layers {asked} is more than the {most} of {profile.name}; give at most {profile.num_blocks}, or "
        "leave it out for all"
    ]


def adapter_problems(profile: ModelProfile, strategy: str, targets: tuple[str, ...]) -> list[str]:
    """List problems of the requested adapters."""
    from shardwise.model.lora import with_adapters

    try:
        with_adapters(profile, parse_strategy(strategy).adapter, targets=targets)
    except PlanError as error:
        return list(error.problems)
    return []


def choice_problems(choices: list[tuple[str, str | None, tuple[str, ...]]]) -> list[str]:
    """List each option whose given value is unknown, with the known values."""
    return [
        f"{option} '{value}' must be one of {', '.join(known)}{did_you_mean(value, known)}"
        for option, value, known in choices
        if value is not None and value not in known
    ]


def read_count(text: str) -> float:
    """Parse ``1e12``, ``300B`` or ``1.5T`` to a number.

    Raises:
        UserError: it is not a number, not above 0, or above `MOST_TOKENS`.
    """
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        number = float(digits.replace("_", "")) * unit
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_TOKENS:
        raise UserError(
            f"--tokens '{text:.20}' must be a number above 0, at most {MOST_TOKENS:g}; write it as 1e12, 300B or 1.5T"
        )
    return number


def read_length(text: str | None, option: str = "--seq-len") -> int | None:
    """``4096`` or ``4k`` as a number of tokens.

    Raises:
        UserError: it is none, or out of range.
    """
    if text is None:
        return None
    digits, times = (text[:-1], 1024) if text[-1:].lower() == "k" else (text, 1)
    number = int(digits) * times if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
    if not 1 <= number <= LONGEST:
        raise UserError(
            f"{option} '{text:.20}' must be a whole number of tokens from 1 to {LONGEST}; write 4096, or 4k for it"
        )
    return number


def read_layers(text: str | int | None) -> str | int | None:
    """Return a number of blocks, or ``all``.

    Raises:
        UserError: it is neither, or out of range.
    """
    if text is None or text == ALL_LAYERS:
        return text
    digits = str(text).strip().replace(",", "")
    number = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else 0
    if not 1 <= number <= MOST_LAYERS:
        raise UserError(f"--recompute-layers '{text!s:.20}' must be all, or a whole number from 1 to {MOST_LAYERS}")
    return number


def without_effect_notes(
    words: Mapping[str, Any], profile: ModelProfile, cluster: ClusterSpec, links: CalibrationFile | None
) -> list[str]:
    """List arguments without an effect, or with an unknown one."""
    notes = []
    adapters = {"--lora-rank": words["lora_rank"], "--lora-targets": words["lora_targets"]}
    if words["strategy"] is None or "lora" not in words["strategy"]:
        given_to = [f"{option} {value}" for option, value in adapters.items() if value is not None]
        notes += [f"{text} counts only where adapters are proposed; pin --strategy fsdp+lora" for text in given_to]
    if words["virtual_stages"] > 1 and words["strategy"] is None:
        notes.append(
            f"--virtual-stages {words['virtual_stages']} counts only where pipelines are proposed; "
            "pin --strategy fsdp+pp2"
        )
    if profile.seq_len is None:
        given = {"--seq-len": words["seq_len"], "--tokens": words["tokens"]}
        unread = [f"{option} {value}" for option, value in given.items() if value is not None]
        notes += [f"{words_given} has no effect: {profile.name} does not read tokens" for words_given in unread]
    if words["document_len"] is not None and words["document_len"] >= (profile.seq_len or 0):
        tokens = "does not read tokens" if profile.seq_len is None else f"has samples of {profile.seq_len} tokens"
        notes.append(f"--document-len {words['document_len']} has no effect: {profile.name} {tokens}")
    name = "a CPU" if cluster.gpu is None else cluster.gpu.name
    has = set() if cluster.gpu is None else set(cluster.gpu.peak_flops)
    if words["fp8"] in RECIPES and cluster.device == "cpu":
        notes.append(f"--fp8 {words['fp8']}: PyTorch has no fp8 products on a CPU; fp8_emulate = true tests them there")
    elif words["fp8"] in RECIPES and profile.experts:
        notes.append(
            f"--fp8 {words['fp8']}: {profile.name} has experts, whose grouped products stay in bf16; train "
            "does not run fp8 with them"
        )
    elif words["fp8"] in RECIPES and not words["compiled"]:
        notes.append(f"--fp8 {words['fp8']} without --compile: each cast to fp8 is ten kernels; add --compile")
    if words["precision"] == "fp8" and cluster.device == "cpu":
        notes.append("--precision fp8: PyTorch has no fp8 matrix products on a CPU; memory is that of bf16")
    elif words["precision"] is not None and has and words["precision"] not in has:
        usual = ", ".join(one for one in get_args(Precision) if one in has)
        notes.append(
            f"--precision {words['precision']}: {name} has no units for it, so speed is unknown; it has {usual}"
        )
    measured = links is not None and covers(links, cluster)
    if cluster.device == "cuda" and not measured and (unknown := unknown_links(cluster)):
        notes.append(
            f"the speed of the {' and the '.join(unknown)} is unknown, and so is that of every plan; give it as in "
            f"--cluster {cluster.nodes}x{cluster.devices_per_node}x{cluster.device_name}@pcie4/eth25"
        )
    return notes
