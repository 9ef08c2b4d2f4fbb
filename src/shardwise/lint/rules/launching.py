"""Rules about how ranks are started: launch lines, variables, Slurm, signals."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.lint.fixes import replace
from shardwise.lint.launch_file import Command, LaunchFile
from shardwise.lint.rank_tests import tests_above
from shardwise.lint.rule import Fault, rule
from shardwise.lint.script import Loop, Script, called_name, keyword

_RENAMED = ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")
_LEVELS = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
}
_MISTAKEN = {
    "NCCL_SOCKET_IFACE": "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_INTERFACE": "NCCL_SOCKET_IFNAME",
    "NCCL_IFNAME": "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLED": "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLED": "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLED": "NCCL_SHM_DISABLE",
    "NCCL_DEBUG_SUBSYSTEM": "NCCL_DEBUG_SUBSYS",
    "NCCL_DEBUG_LEVEL": "NCCL_DEBUG",
    "GLOO_SOCKET_INTERFACE": "GLOO_SOCKET_IFNAME",
    "GLOO_SOCKET_IFACE": "GLOO_SOCKET_IFNAME",
    "NCCL_TIMEOUT": "init_process_group(timeout=...)",
    "TORCH_NCCL_TIMEOUT": "init_process_group(timeout=...)",
    "MASTER_ADDRESS": "MASTER_ADDR",
}


def _variables(read: Script | LaunchFile) -> Iterator[tuple[str, str | None, int, ast.expr | None]]:
    """Variables that a script or a launch file sets: name, value where it is written, line, the name's node."""
    if isinstance(read, LaunchFile):
        for name, (value, line) in read.variables.items():
            yield name, value, line, None
        return
    for node in read.nodes:
        match node:
            case ast.Assign(
                targets=[ast.Subscript(value=holder, slice=ast.Constant(value=str(name)) as key)], value=given
            ):
                pass
            case ast.Call(
                func=ast.Attribute(value=holder, attr="setdefault"), args=[ast.Constant(value=str(name)) as key, given]
            ):
                pass
            case _:
                continue
        if read.name(holder) == "os.environ":
            yield name, getattr(given, "value", None), key.lineno, key


def _at(read: Script | LaunchFile, line: int, node: ast.expr | None, text: str) -> Fault:
    if isinstance(read, Script) and node is not None:
        return read.fault(node, text)
    return Fault(line, 1, text)


@rule(
    "SW701",
    "renamed-nccl-variable",
    kinds=("script", "launch file"),
    severity="warning",
    message="PyTorch 2.2 renamed this variable to TORCH_NCCL_...: the old name warns, and loses to the new one.",
    why="""The new name wins where both are set, and torchrun sets TORCH_NCCL_ASYNC_ERROR_HANDLING=1 for every rank:
    the old name then does nothing.""",
    fix="put TORCH_ before the name",
)
def renamed_variable(read: Script | LaunchFile) -> Iterator[Fault]:
    """A variable of PyTorch's NCCL backend by its old name."""
    for name, _, line, node in _variables(read):
        if name in _RENAMED:
            text = f"PyTorch 2.2 renamed {name} to TORCH_{name}: the old name warns, and loses to the new one."
            fault = _at(read, line, node, text)
            quoted = isinstance(read, Script) and node is not None
            yield Fault(fault.line, fault.column, text, (replace(node, f'"TORCH_{name}"'),) if quoted and node else ())


@rule(
    "SW702",
    "level-that-does-not-exist",
    kinds=("script", "launch file"),
    message="This is no level of the variable: NCCL then logs nothing, and `import torch` raises ValueError.",
    why="""NCCL_DEBUG is VERSION, WARN, INFO, ABORT or TRACE, anything else is none; TORCH_DISTRIBUTED_DEBUG is OFF,
    INFO or DETAIL, and is read once, when torch is imported.""",
    fix="use INFO",
)
def no_such_level(read: Script | LaunchFile) -> Iterator[Fault]:
    """NCCL_DEBUG or TORCH_DISTRIBUTED_DEBUG with a value that is none of theirs."""
    for name, value, line, node in _variables(read):
        known = name in _LEVELS and isinstance(value, str) and value and not re.search("[$`]", value)
        if known and str(value).upper() not in _LEVELS[name]:
            effect = "NCCL logs nothing" if name == "NCCL_DEBUG" else "a later `import torch` raises ValueError"
            yield _at(read, line, node, f"{name}={value} is none of {', '.join(_LEVELS[name])}: {effect}.")


@rule(
    "SW703",
    "variable-that-nothing-reads",
    kinds=("script", "launch file"),
    severity="warning",
    message="Nothing reads a variable of this name.",
    why="Neither NCCL nor gloo nor PyTorch knows it, and an unknown variable is no error.",
    fix="use the name that is read",
)
def variable_unread(read: Script | LaunchFile) -> Iterator[Fault]:
    """One of the names that are often taken for a variable of NCCL, gloo or PyTorch."""
    for name, _, line, node in _variables(read):
        used = isinstance(read, LaunchFile) and re.search(rf"\$\{{?{name}\b", read.text)
        if name in _MISTAKEN and not used:
            yield _at(read, line, node, f"Nothing reads {name}: it is {_MISTAKEN[name]}.")


@rule(
    "SW704",
    "script-without-a-launcher",
    kinds=("launch file",),
    message="The script needs RANK and WORLD_SIZE, and nothing here sets them: init_process_group() raises ValueError.",
    why=""""environment variable RANK expected, but not set": torchrun, srun with exports, or the script itself sets
    them.""",
    fix="start it with torchrun --nproc-per-node=<GPUs>",
)
def script_without_launcher(read: LaunchFile) -> Iterator[Fault]:
    """`python train.py` where train.py calls init_process_group() and nothing sets RANK."""
    set_here = {name for name, *_ in _variables(read)} | set(re.findall(r"\b(RANK|WORLD_SIZE)=", read.text))
    if set_here & {"RANK", "WORLD_SIZE"} or read.sbatch:
        return
    for command in read.commands:
        if not re.fullmatch(r"python[\d.]*", command.program) or command.is_torchrun:
            continue
        script = next((word for word in command.bare[1:] if not word.startswith("-")), "")
        needs = script.endswith(".py") and command.bare[1] != "-m" and _needs_ranks(read, script)
        if needs:
            yield read.fault(command.line)


def _needs_ranks(read: LaunchFile, script: str) -> bool:
    """Whether the script beside the launch file takes its rank from the environment."""
    for folder in (read.path.parent, read.path.parent.parent):
        path = folder / script
        if path.is_file():
            try:
                text = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                return False
            own = re.search(
                r"spawn|start_processes|environ\[.(RANK|WORLD_SIZE).\]\s*=|setdefault|is_torchelastic|rank=|store=",
                text,
            )
            asked = re.search(r"environ|getenv|is_distributed|is_available", text)
            unknown = own or asked or "init_method" in text
            return "init_process_group(" in text and not unknown and _always_starts(path, text)
    return False


def _always_starts(path: Path, text: str) -> bool:
    """Whether a script calls init_process_group() whatever its options are."""
    try:
        script = Script(path, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(_always_runs(script, call) for call in script.torch_calls("init_process_group"))


def _always_runs(script: Script, node: ast.AST, depth: int = 0) -> bool:
    tests = [test for test, answer in tests_above(script, node) if not answer or "__name__" not in ast.unparse(test)]
    scope = script.scope(node)
    above = [one for one in script.above(node) if script.inside(one, scope)]
    if tests or depth > 3 or any(isinstance(one, ast.Try | ast.BoolOp | ast.Match | Loop) for one in above):
        return False
    return scope is script.tree or any(_always_runs(script, call, depth + 1) for call in script.callers(scope))


@rule(
    "SW705",
    "launcher-in-every-task",
    kinds=("launch file",),
    message="""srun starts torchrun once for each task: two of one node may take all places of the run, and the rest
    fail.""",
    why="""torchrun is to run once on each node, and starts all of its ranks. A rendezvous of n nodes takes the n
    torchruns that come first: where two of them are on one node, their ranks share its GPUs.""",
    fix="set #SBATCH --ntasks-per-node=1, or let srun start the script without torchrun",
)
def launcher_in_every_task(read: LaunchFile) -> Iterator[Fault]:
    """`srun torchrun` in a job of several tasks a node."""
    for command in _commands(read, "srun"):
        if command.is_torchrun and (_tasks_of_a_node(read, command) or 0) > 1:
            yield read.fault(command.line)


def _tasks_of_a_node(read: LaunchFile, srun: Command) -> int | None:
    """Tasks that a srun starts on each node: by its own options, else by the job's; ``None`` where that is unknown."""
    each, total = srun.option("ntasks-per-node"), srun.option("ntasks", "n")
    nodes = srun.option("nodes", "N") or read.sbatch.get("nodes", ("1", 0))[0]
    if each is None and total is None:
        each, total = (str(one) if one else None for one in (read.job("ntasks-per-node"), read.job("ntasks")))
    if each is not None:
        return int(each) if each.isdecimal() else None
    return int(total) // int(nodes) if total and total.isdecimal() and nodes.isdecimal() and int(nodes) else None


def _commands(read: LaunchFile, program: str) -> Iterator[Command]:
    return (one for one in read.commands if one.program == program)


@rule(
    "SW706",
    "more-ranks-than-gpus",
    kinds=("launch file",),
    message='More ranks are started on a node than it has GPUs: the last ones raise "invalid device ordinal".',
    why="Rank i of a node uses GPU i; the job or CUDA_VISIBLE_DEVICES has fewer.",
    fix="make --nproc-per-node the number of GPUs",
)
def more_ranks_than_gpus(read: LaunchFile) -> Iterator[Fault]:
    """--nproc-per-node above the GPUs of the Slurm job or of CUDA_VISIBLE_DEVICES."""
    gres = re.search(r"gpu(?::\w+)?:(\d+)", read.sbatch.get("gres", ("", 0))[0])
    of_job = read.job("gpus-per-node") or (int(gres.group(1)) if gres else None)
    for command in read.commands:
        visible = read.value_at(command, "CUDA_VISIBLE_DEVICES")
        gpus = len(visible.split(",")) if re.fullmatch(r"\d+(,\d+)*", visible) else of_job
        ranks = command.option("nproc-per-node")
        if command.is_torchrun and gpus is not None and ranks is not None and ranks.isdecimal() and int(ranks) > gpus:
            text = f"{ranks} ranks are started on a node with {gpus} GPU{'s' * (gpus != 1)}: the last ones raise"
            yield read.fault(command.line, f'{text} "invalid device ordinal".')


@rule(
    "SW707",
    "one-port-for-many-runs",
    kinds=("launch file",),
    message='Several runs use one port on a machine: the second stops ("address already in use").',
    why="""torchrun listens at the port that it is given. Without one it takes a free one on a single machine (PyTorch
    2.13; older ones may take 29500 for every run), and 29500 with several nodes.""",
    fix="give each run a port of its own, or torchrun --standalone, which takes a free one",
)
def one_port_for_many_runs(read: LaunchFile) -> Iterator[Fault]:
    """Two torchrun in the background with one port; an array job with a fixed MASTER_PORT that something reads."""
    port = read.variables.get("MASTER_PORT", ("", 0))
    torchruns = any(one.is_torchrun for one in read.commands)
    uses = [line for line in read.text.split("\n") if re.search(r"\$\{?MASTER_PORT\b", line)]
    is_read = uses if torchruns else [""]  # torchrun itself does not read it
    shared = is_read and not any(re.search("ARRAY|RANDOM|JOB_?ID", line) for line in is_read)
    one_by_one = read.sbatch.get("array", ("", 0))[0].endswith("%1") or "exclusive" in read.sbatch
    if "array" in read.sbatch and port[0].isdecimal() and shared and not one_by_one:
        yield read.fault(port[1])
    ports: dict[str, Command] = {}
    for command in read.commands:
        if command.branches or command.program == "wait":
            ports = {}
        elsewhere = command.program in ("ssh", "pdsh", "srun", "docker", "podman", "kubectl")
        if not command.is_torchrun or not command.background or elsewhere or command.option("standalone") is not None:
            continue
        given = command.option("master-port", "rdzv-endpoint")
        if given is None and command.option("nnodes") not in (None, "1"):
            given = "29500"
        if given is None or command.option("node-rank") not in (None, "0"):  # only the first node's listens
            continue
        if given in ports and command.option("rdzv-backend") is None and "$" not in given:
            yield read.fault(command.line)
        ports[given] = command


@rule(
    "SW708",
    "srun-without-cpus",
    kinds=("launch file",),
    severity="warning",
    message="srun does not take over --cpus-per-task: a task may get one CPU, and data loading crawls.",
    why="Since Slurm 22.05 srun reads SRUN_CPUS_PER_TASK, no longer what sbatch was given.",
    fix="export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, or give srun --cpus-per-task=$SLURM_CPUS_PER_TASK",
)
def srun_without_cpus(read: LaunchFile) -> Iterator[Fault]:
    """#SBATCH --cpus-per-task, and a srun that starts ranks without it."""
    if (read.job("cpus-per-task") or 1) < 2 or "SRUN_CPUS_PER_TASK" in read.text:
        return
    for command in _commands(read, "srun"):
        trains = command.is_torchrun or any(
            re.search(r"(^|/)(python[\d.]*|accelerate|deepspeed|bash)$|\.py$", word) for word in command.words
        )
        given = command.option("cpus-per-task") or command.option("c")
        if trains and given is None and "--exclusive" not in command.words:
            yield read.fault(command.line)


@rule(
    "SW709",
    "nodes-without-a-meeting-point",
    kinds=("launch file",),
    message="The nodes cannot find each other: each waits at its own localhost until the timeout.",
    why="""Without --rdzv-endpoint or --master-addr torchrun meets at 127.0.0.1, and --standalone always meets at the
    node's own localhost, whatever else is given.""",
    fix="give all nodes --rdzv-backend=c10d --rdzv-endpoint=<first node>:29500",
)
def nodes_without_meeting_point(read: LaunchFile) -> Iterator[Fault]:
    """torchrun --nnodes=2 without an address, or with --standalone."""
    for command in read.commands:
        nodes = command.option("nnodes") or ""
        if not command.is_torchrun or not nodes.isdecimal() or int(nodes) < 2:
            continue
        alone = command.option("standalone") is not None
        given = command.option("rdzv-endpoint", "master-addr") or "PET_" in read.text
        if alone or not given:
            yield read.fault(command.line)


@rule(
    "SW710",
    "localhost-for-many-nodes",
    kinds=("launch file",),
    message="MASTER_ADDR is this node's own localhost on every node: ranks of other nodes never meet rank 0.",
    why="All ranks connect to MASTER_ADDR, which has to be the first node's name.",
    fix='export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
)
def localhost_for_many_nodes(read: LaunchFile) -> Iterator[Fault]:
    """MASTER_ADDR=localhost, or --master-addr or --rdzv-endpoint at localhost, in a job of several nodes."""
    value, line = read.variables.get("MASTER_ADDR", ("", 0))
    many = (read.job("nodes") or 1) > 1
    if many and value in ("localhost", "127.0.0.1"):
        yield read.fault(line)
    for command in read.commands:
        nodes = command.option("nnodes") or ""
        address = command.option("master-addr", "rdzv-endpoint") or ""
        several = many or (nodes.isdecimal() and int(nodes) > 1)
        if command.is_torchrun and several and address.partition(":")[0] in ("localhost", "127.0.0.1"):
            yield read.fault(command.line)


@rule(
    "SW711",
    "termination-ignored",
    severity="warning",
    message="SIGTERM is ignored: the scheduler waits its grace period and kills the run without a last checkpoint.",
    why="""torchrun, Slurm and Kubernetes end processes with SIGTERM and send SIGKILL some 30 seconds later; what was
    trained since the last checkpoint is lost.""",
    fix="handle SIGTERM: finish the step, save on all ranks, and exit",
)
def termination_ignored(script: Script) -> Iterator[Fault]:
    """signal(SIGTERM, SIG_IGN), or a handler that does nothing, in a distributed script."""
    for call in script.calls:
        if script.name(call.func) != "signal.signal" or len(call.args) != 2 or not script.is_distributed:
            continue
        handler = call.args[1]
        function = script.functions.get(getattr(handler, "id", ""))
        empty = function is not None and all(
            isinstance(one, ast.Pass) or (isinstance(one, ast.Expr) and _says_only(one.value)) for one in function.body
        )
        if script.name(call.args[0]) == "signal.SIGTERM" and (script.name(handler) == "signal.SIG_IGN" or empty):
            yield script.fault(call)


def _says_only(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) or (isinstance(node, ast.Call) and called_name(node) == "print")


@rule(
    "SW712",
    "local-rank-option",
    message="""torchrun passes no --local_rank, and torch.distributed.launch passes --local-rank: the option keeps its
    default.""",
    why="""Since PyTorch 2.0 the rank on the node is in LOCAL_RANK; under torchrun every process has the option's
    default and uses the same GPU, under torch.distributed.launch argparse stops at the dash.""",
    fix='read int(os.environ["LOCAL_RANK"])',
)
def local_rank_option(script: Script) -> Iterator[Fault]:
    """add_argument("--local_rank") whose value selects the device, where LOCAL_RANK is read nowhere."""
    strings = {node.value for node in script.nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    if any("LOCAL_RANK" in one for one in strings) or script.imports("deepspeed", "transformers", "accelerate"):
        return
    set_later = any(
        isinstance(node, ast.Attribute) and node.attr == "local_rank" and isinstance(node.ctx, ast.Store)
        for node in script.nodes
    )
    if set_later or strings & {"SLURM_LOCALID", "MPI_LOCALRANKID"}:
        return
    selects = any(
        "local_rank" in ast.unparse(one)
        for call in script.torch_calls("set_device", "device", "DistributedDataParallel")
        for one in (*call.args, *(key.value for key in call.keywords))
    )
    for call in script.method_calls("add_argument"):
        names = {getattr(one, "value", None) for one in call.args}
        alone = "--local_rank" in names and "--local-rank" not in names and keyword(call, "dest") is None
        if alone and selects and script.torch_calls("init_process_group"):
            yield script.fault(call)


@rule(
    "SW713",
    "one-thread-pool-for-all",
    kinds=("launch file",),
    severity="warning",
    message="Each rank gets as many threads as the job has CPUs in all: they fight for the cores.",
    why="OMP_NUM_THREADS is for one process; torchrun starts nproc of them on the node.",
    fix="divide the CPUs of the node by the number of ranks",
)
def too_many_threads(read: LaunchFile) -> Iterator[Fault]:
    """OMP_NUM_THREADS equal to the job's CPUs, and torchrun with several ranks in one task."""
    value, line = read.variables.get("OMP_NUM_THREADS", ("", 0))
    cpus = read.job("cpus-per-task")
    everything = value in ("$SLURM_CPUS_PER_TASK", "${SLURM_CPUS_PER_TASK}", "$(nproc)") or (
        cpus and value == str(cpus)
    )
    for command in read.commands:
        ranks = command.option("nproc-per-node") or ""
        if (
            everything
            and command.is_torchrun
            and ranks.isdecimal()
            and int(ranks) > 1
            and read.job("ntasks-per-node") in (None, 1)
        ):
            yield read.fault(line)
            return
