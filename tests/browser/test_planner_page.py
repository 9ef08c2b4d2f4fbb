"""The planner page in a real browser: every number is the command line's, and nothing else happens."""

# ruff: noqa: E501  (scripts of pages)

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest

from shardwise.web.answer import texts
from tests.browser.pages import SIZES, browser, why_not
from tests.browser.sites import axe_script, built_site, served, why_no_site
from tests.commands import shardwise

REASON = why_not() or why_no_site()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=REASON or ""), pytest.mark.timeout(600)]
SEED, FEW, MANY = 20261124, 8, 200
FLAGS = ("compile", "any", "optimizer-in-backward", "serve")
SERVED = {"model": "llama-3.1-70b", "cluster": "4xA100-SXM-80GB", "serve": "on", "context": "32k", "concurrency": "12"}
USUAL = {"model": "llama-3.1-8b", "cluster": "8xA100-SXM-80GB", "seq-len": "4096", "global-batch": "64"}
CONFIG = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1000,
          "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048}  # fmt: skip
TYPES = (  # the last is refused
    {"weights": "compute", "rounding": "stochastic"},
    {"weights": "compute", "rounding": "kahan"},
    {"weights": "masters", "accumulate": "compute"},
    {"weights": "masters", "reduce": "compute"},
    {"weights": "fp32", "accumulate": "compute"},
)
NUMBERS = """
return [...document.querySelectorAll('#result .num[data-path]')].filter((one) => !one.closest('#curves, [data-question]'))
  .map((one) => [one.dataset.path, one.textContent]);
"""
OUTSIDE = """
return [...document.querySelectorAll("body *")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
  && !e.closest(".scroll, pre, svg, .hidden, details:not([open])")).map((e) => e.tagName + "." + e.className);
"""
AXE = """
const done = arguments[0];
axe.run(document, { resultTypes: ["violations"] }).then((found) => done(found.violations.map(
  (one) => one.id + ": " + one.nodes.slice(0, 3).map((node) => node.html.slice(0, 160) + " " + node.any.map((x) => x.message)).join(" | "))));
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """The site below a path, open in one browser, and whatever it has asked of the network so far."""
    root = built_site()
    axe = axe_script(tmp_path_factory.mktemp("axe"))
    with served(root) as address, browser() as chromium:
        chromium.driver.set_script_timeout(60)
        found = SimpleNamespace(chromium=chromium, base=f"{address}/some/where/", axe=axe, root=root)
        chromium.driver.get(f"{found.base}index.html#{urlencode(USUAL)}")
        wait(found, "return shardwise.isShown(arguments[0])", urlencode(USUAL))
        wait(found, "return document.body.dataset.fast === 'ready'")
        yield found


@pytest.fixture(autouse=True)
def quiet(request) -> Iterator[None]:
    """No test leaves a line on the console, or has asked anything but the site's own files."""
    yield
    if REASON is None and "page" in request.fixturenames:
        found = request.getfixturevalue("page")
        assert found.chromium.console() == []
        strange = [url for url in found.chromium.requests() if not url.startswith((found.base, "blob:", "data:"))]
        assert strange == []


def wait(page: SimpleNamespace, script: str, *arguments: Any, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not page.chromium.run(script, *arguments):
        assert time.monotonic() < deadline, f"not within {seconds} s: {script}"
        time.sleep(0.05)


def show(page: SimpleNamespace, words: dict[str, str]) -> None:
    """Open the address of a question, and wait for its answer."""
    page.chromium.run("location.hash = arguments[0]", urlencode(words))
    wait(page, "return shardwise.isShown(arguments[0]) && !document.querySelector('#result.stale')", urlencode(words))


def asked_of_the_command_line(words: dict[str, str]) -> dict[str, Any] | list[str]:
    """The document of ``shardwise plan --json``, or the problems that it prints."""
    flags = [f"--{name}" for name in FLAGS if name in words]
    options = [text for name, value in words.items() if name not in ("model", *FLAGS) for text in (f"--{name}", value)]
    done = shardwise("plan", words["model"], *options, *flags, "--json", exit_code=None)
    if done.returncode == 2:
        return done.stderr.splitlines()
    return json.loads(done.stdout.splitlines()[-1])


def same(one: Any, other: Any, place: str = "") -> None:
    """Equal but for the last digits of a float, which another C library may round otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), place
        for key in one:
            same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list) and isinstance(other, list):
        assert len(one) == len(other), place
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            same(left, right, f"{place}.{i}")
    elif isinstance(one, float) or isinstance(other, float):
        assert one == pytest.approx(other, rel=1e-12), place
    else:
        assert one == other, place


def random_question(dice: random.Random) -> dict[str, str]:
    """A question that people ask, fitting or not, now and then with everything pinned."""
    models = ("llama-3.1-8b", "gpt2", "llama-7b", "gpt2-xl", "llama-13b", "qwen2.5-7b", "mistral-7b", "llama-3.1-70b")
    gpus = ("A100-SXM-80GB", "H100-SXM", "RTX4090", "V100-SXM-32GB", "L4", "B200")
    words = {
        "model": dice.choice(models),
        "cluster": f"{dice.choice((1, 2, 4, 8, '2x8', '4x8'))}x{dice.choice(gpus)}",
        "seq-len": str(dice.choice((512, 1000, 1024))),
        "global-batch": str(dice.choice((8, 16, 32, 48, 64, 256))),
    }
    if dice.random() < 0.3:
        words["tokens"] = dice.choice(("1B", "300B", "1e12"))
    if dice.random() < 0.3:
        words["strategy"] = dice.choice(("ddp", "zero2", "fsdp", "fsdp+tp2", "fsdp+lora", "ddp+qlora", "hsdp"))
    for name, values in {
        "optimizer": ("adafactor", "sgd", "muon"),
        "precision": ("bf16", "fp32"),
        "recompute": ("none", "full"),
        "program": ("torchtitan", "megatron", "deepspeed", "trl"),
        "weights": ("compute", "masters", "fp32"),
    }.items():
        if dice.random() < 0.15:
            words[name] = dice.choice(values)
    for name, values in {
        "loss-chunks": ("4",),
        "document-len": ("256",),
        "lora-rank": ("8",),
        "lora-targets": ("attention", "q_proj,v_proj"),
        "objective": ("dpo",),
        "framework-overhead": ("off",),
    }.items():
        if dice.random() < 0.06:
            words[name] = dice.choice(values)
    for flag in ("compile", "any", "optimizer-in-backward"):
        if dice.random() < 0.1:
            words[flag] = "on"
    if dice.random() < 0.2:
        words |= dice.choice(TYPES)
    return words


def random_serving(dice: random.Random) -> dict[str, str]:
    """A question about inference."""
    models = ("llama-3.1-8b", "gpt2", "qwen2.5-7b", "mistral-7b", "llama-3.1-70b", "qwen3-30b-a3b", "deepseek-v3")
    gpus = ("A100-SXM-80GB", "H100-SXM", "RTX4090", "V100-SXM-32GB", "L4", "MI300X")
    words = {
        "model": dice.choice(models),
        "cluster": f"{dice.choice((1, 2, 4, 8, '2x8'))}x{dice.choice(gpus)}",
        "serve": "on",
    }
    for name, values in {
        "context": ("1000", "4k", "32k", "128k"),
        "concurrency": ("1", "7", "16", "256"),
        "quant": ("int8", "int4", "fp8"),
        "kv-cache": ("fp8", "16-bit"),
        "tp": ("1", "2", "4", "8"),
    }.items():
        if dice.random() < 0.5:
            words[name] = dice.choice(values)
    return words


@pytest.mark.parametrize("ask", [random_question, random_serving])
@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_every_number_is_the_command_lines(page, number, ask):
    dice, answered = random.Random(SEED), 0
    for _ in range(number):
        words = ask(dice)
        show(page, words)
        expected = asked_of_the_command_line(words)
        if isinstance(expected, list):
            lines = page.chromium.run(
                "return [...document.querySelectorAll('.card.bad li')].map((li) => li.textContent)"
            )
            assert lines and all(any(line in printed for printed in expected) for line in lines), words
            continue
        same(page.chromium.run("return shardwise.answer().document"), expected, str(words))
        page.chromium.run("document.querySelectorAll('.strategy').forEach((one, i) => { if (i < 3) one.open = true; })")
        told = texts(expected)
        wrong = [(path, text, told.get(path)) for path, text in page.chromium.run(NUMBERS) if text != told.get(path)]
        assert not wrong, (words, wrong[:5])
        assert len(page.chromium.run(NUMBERS)) > 8
        answered += 1
    assert answered > number / 2


def test_a_curves_numbers_too(page):
    show(page, USUAL)
    wait(
        page,
        "return document.querySelectorAll('#curves tr').length >= 14 && !document.querySelector('#curves').textContent.includes('…')",
    )
    rows = page.chromium.run(
        "return [...document.querySelectorAll('#curves tr[data-question]')].map((row) => "
        "[JSON.parse(row.dataset.question), row.querySelector('.num')?.dataset.path ?? null, row.querySelector('td').textContent])"
    )
    for question, path, text in random.Random(SEED).sample(rows, 4):
        words = {name.replace("_", "-"): value for name, value in question.items()}
        expected = asked_of_the_command_line(words)
        assert path is not None and isinstance(expected, dict), text
        assert text.removesuffix(", does not fit") == texts(expected)[path]
        assert text.endswith(", does not fit") == (expected["candidates"][0]["fits"] is False)


@pytest.mark.parametrize(
    ("size", "theme"),
    [
        ("phone", "light"),
        ("desktop", "dark"),
        pytest.param("phone", "dark", marks=pytest.mark.soak),
        pytest.param("desktop", "light", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("question", [USUAL, SERVED], ids=["train", "serve"])
def test_the_page_is_as_wide_as_the_screen_and_readable_by_all(page, tmp_path, size, theme, question):
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    page.chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.chromium.size = (width, height)
    page.chromium.scheme(theme)
    try:
        clusters = [("cluster", "8xA100-SXM-80GB"), ("cluster", "2x8xH100-SXM")]
        page.chromium.run(
            "location.hash = arguments[0]",
            urlencode([*((k, v) for k, v in question.items() if k != "cluster"), *clusters]),
        )
        wait(page, "return document.querySelectorAll('tbody [data-question] td:nth-child(3) .num').length == 2")
        page.chromium.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        assert page.chromium.run("return document.documentElement.scrollWidth") == width
        assert page.chromium.run(OUTSIDE) == []
        assert page.chromium.run("return document.documentElement.dataset.theme") == theme
        page.chromium.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
        page.chromium.run(page.axe + "; window.axe = axe; return 1")
        assert page.chromium.driver.execute_async_script(AXE) == []
        assert page.chromium.screenshot(tmp_path / "page.png").stat().st_size > 50_000
    finally:
        desktop = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.chromium.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", desktop)
        page.chromium.size = SIZES["desktop"]
        page.chromium.run("document.querySelectorAll('details').forEach((one) => { one.open = false; })")


@pytest.mark.soak
def test_a_slider_answers_by_keyboard_and_the_last_answer_stays_visible(page):
    from selenium.webdriver.common.keys import Keys

    show(page, USUAL)
    slider = page.chromium.driver.find_element("id", "global_batch-slider")
    slider.send_keys(Keys.ARROW_RIGHT)
    assert page.chromium.run("return document.querySelector('#result h2').textContent") != ""
    wait(page, "return (document.body.dataset.quick ?? '').includes('\"global_batch\":\"128\"')")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    words = USUAL | {"global-batch": "256"}
    wait(page, "return shardwise.isShown(arguments[0])", urlencode(words))
    same(page.chromium.run("return shardwise.answer().document"), asked_of_the_command_line(words))
    wait(page, "return location.hash.includes('global-batch=256')")


def test_an_empty_field_shows_what_was_filled_in(page):
    show(page, {"model": "llama-3.1-8b", "cluster": "8xA100-SXM-80GB"})
    workload = page.chromium.run("return shardwise.answer().document.workload")
    for name, unit in (("seq_len", "tokens"), ("global_batch", "samples")):
        placeholder, value, slider, said = page.chromium.run(
            "const [field, slider] = ['', '-slider'].map((end) => document.getElementById(arguments[0] + end));"
            "return [field.placeholder, field.value, slider.value, slider.getAttribute('aria-valuetext')]",
            name,
        )
        assert (placeholder, value, said) == (str(workload[name]), "", f"{workload[name]} {unit}")
        assert 2 ** int(slider) == workload[name]


def test_the_serve_tab_by_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    show(page, USUAL)
    find = page.chromium.driver.find_element
    find("id", "to-serve").send_keys(Keys.ENTER)
    wait(page, "return shardwise.answer().serving && !document.querySelector('#result.stale')")
    assert page.chromium.run("return document.getElementById('to-serve').getAttribute('aria-pressed')") == "true"
    assert page.chromium.run("return document.getElementById('seq_len').offsetParent") is None
    find("id", "concurrency-slider").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    wait(page, "return shardwise.answer().document.concurrency === 4")
    wait(page, "return location.hash.includes('serve=on') && location.hash.includes('concurrency=4')")
    command = page.chromium.run("return document.getElementById('command').textContent").split()
    assert command[2:] == ["llama-3.1-8b", "--cluster", "8xA100-SXM-80GB", "--serve", "--concurrency", "4"]
    find("id", "to-train").send_keys(Keys.ENTER)
    wait(page, "return Boolean(shardwise.answer().document.candidates)")
    assert page.chromium.run("return document.querySelectorAll('.strategy').length") > 3


@pytest.mark.soak
def test_of_many_questions_the_newest_is_answered(page):
    """An answer that comes late is not shown over a newer one."""
    show(page, USUAL)
    page.chromium.run(
        "const box = document.getElementById('global_batch');"
        "for (const n of [8, 16, 24, 32, 40, 72]) { box.value = n; box.dispatchEvent(new Event('input')); }"
    )
    words = USUAL | {"global-batch": "72"}
    wait(page, "return shardwise.isShown(arguments[0])", urlencode(words))
    time.sleep(1)
    assert page.chromium.run("return shardwise.answer().document.workload.global_batch") == 72
    assert "72" in page.chromium.run("return document.getElementById('command').textContent")


@pytest.mark.soak
def test_a_wrong_question_has_every_problem_at_once(page):
    words = {"model": "lama-3", "cluster": "8xA1000", "global-batch": "0", "seq-len": "-1"}
    show(page, words)
    text = page.chromium.run("return document.querySelector('.card.bad').textContent")
    assert all(part in text for part in ("'lama-3'", "'A1000'", "--global-batch '0'", "--seq-len '-1'"))
    show(page, USUAL)
    assert page.chromium.run("return document.querySelector('.card.bad')") is None


@pytest.mark.soak
def test_unknown_is_shown_as_unknown(page):
    show(page, USUAL | {"cluster": "2x2xRTX4090", "model": "gpt2", "seq-len": "1024"})
    assert "unknown time" in page.chromium.run("return document.querySelector('.hero h2').textContent")
    found = page.chromium.run(NUMBERS)
    times = [text for path, text in found if path.endswith(("step_time_s", "mfu", "tokens_per_s_per_device"))]
    assert times and set(times) == {"unknown"}


def test_a_hostile_configuration_is_only_text(page):
    evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
    for text in (
        json.dumps(CONFIG | {"_name_or_path": evil}),
        '{"model_type": ' + json.dumps(evil) + "}",
        evil,
        "[" * 5000,
        '{"hidden_size": 1e999}',
    ):
        words = {name: value for name, value in USUAL.items() if name != "model"} | {"config": text, "seq-len": "1024"}
        show(page, words)
        assert page.chromium.run("return document.title") == "Shardwise planner"
        assert page.chromium.run("return document.querySelectorAll('main img, main script').length") == 0
        assert page.chromium.run("return document.querySelector('#result h2').textContent") != ""
    show(page, USUAL)


@pytest.mark.soak
def test_a_dropped_configuration_is_planned_like_its_file(page, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "_name_or_path": "mine", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
                                "num_attention_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096}))  # fmt: skip
    show(page, USUAL)
    page.chromium.run("document.getElementById('file').hidden = false")
    page.chromium.driver.find_element("id", "file").send_keys(str(file))
    page.chromium.run("document.getElementById('file').hidden = true")
    wait(page, "return shardwise.answer().document.model.name === 'mine'")
    expected = asked_of_the_command_line(USUAL | {"model": str(file)})
    assert isinstance(expected, dict)
    found = page.chromium.run("return shardwise.answer().document")
    same({**found, "model": None}, {**expected, "model": None})
    assert found["model"]["parameters"] == expected["model"]["parameters"]
    assert "config.json" in page.chromium.run("return document.getElementById('command').textContent")
    show(page, USUAL)


@pytest.mark.soak
def test_a_worker_that_dies_is_started_again(page):
    for batch in ("96", "104", "112"):
        page.chromium.run("shardwise.crash()")
        show(page, USUAL | {"global-batch": batch})
        assert page.chromium.run("return shardwise.answer().document.workload.global_batch") == int(batch)


def test_a_configuration_that_ends_the_worker_is_not_sent_to_the_next_one(page):
    def batch(size: int, then: str = "") -> None:
        script = "const box = document.getElementById('global_batch'); box.value = arguments[0]; "
        page.chromium.run(f"{script} box.dispatchEvent(new Event('input')); {then}", size)

    config = json.dumps(CONFIG | {"_name_or_path": "mine"})
    show(
        page, {name: value for name, value in USUAL.items() if name != "model"} | {"config": config, "seq-len": "1024"}
    )
    for size, says in ((4096, "The planner stopped: a test ended it"), (2048, "has let go of it")):
        batch(size, "shardwise.crash()" if size == 4096 else "")
        wait(page, "return document.querySelector('.card.bad')?.textContent.includes(arguments[0])", says)
    show(page, USUAL)


@pytest.mark.soak
def test_the_keyboard_reaches_everything_and_is_not_trapped(page):
    from selenium.webdriver.common.keys import Keys

    show(page, USUAL)
    page.chromium.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    seen = []
    for _ in range(90):
        page.chromium.driver.switch_to.active_element.send_keys(Keys.TAB)
        seen.append(
            page.chromium.run(
                "const e = document.activeElement; return e.id || e.className || e.tagName + e.textContent.slice(0, 20)"
            )
        )
    assert {"model", "gpu", "devices", "devices-slider", "seq_len-slider", "global_batch-slider", "theme"} <= set(seen)
    assert page.chromium.run("return document.querySelectorAll('.strategy summary').length") <= len(seen)
    assert max(map(seen.count, set(seen))) < 60  # nowhere does it stay


def test_from_a_file_the_page_says_how_to_serve_it(page):
    with browser() as other:
        other.driver.get((page.root / "some" / "where" / "index.html").as_uri())
        assert other.run("return document.querySelector('title').textContent") == "Shardwise planner"
        # module scripts are not loaded from files, so the page itself must say it
        assert "http.server" in other.run("return document.body.textContent")


@pytest.mark.soak
def test_the_policy_forbids_other_hosts(page):
    policy = page.chromium.run("return document.querySelector('meta[http-equiv]').content")
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy and "'unsafe-eval'" not in policy
    assert "http" not in policy
    assert not list(Path(page.root).rglob("*.map"))
