"""The catalogue: what it holds adds up to what its sources publish, and names are found as people write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.model.architecture import parameter_count
from shardwise.model.catalogue import (
    CONVNETS,
    catalogue_names,
    find_architecture,
    find_convnet,
    published_parameters,
    unknown_model_message,
)

PUBLISHED = [name for name in catalogue_names() if published_parameters(name)]
KNOWN = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-2-7b": 6_738_415_616,
    "gpt2": 124_439_808,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "vit-l-16": 304_326_632,
}
ASKED = (
    "gpt2 gpt2-medium gpt2-large gpt2-xl llama-2-7b llama-2-13b llama-2-70b llama-3-8b llama-3-70b llama-3.1-8b "
    "llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b llama-3.3-70b qwen2.5-0.5b qwen2.5-1.5b qwen2.5-3b "
    "qwen2.5-7b qwen2.5-14b qwen2.5-32b qwen2.5-72b qwen3-0.6b qwen3-1.7b qwen3-4b qwen3-8b qwen3-14b qwen3-32b "
    "mistral-7b mistral-nemo-12b mixtral-8x7b gemma-2b gemma-7b gemma-2-2b gemma-2-9b gemma-2-27b gemma-3-1b "
    "gemma-3-4b gemma-3-12b gemma-3-27b phi-1.5 phi-2 phi-3-mini phi-4 olmo-1b olmo-7b olmo-2-7b olmo-2-13b "
    "olmo-2-32b mpt-7b mpt-30b falcon-7b falcon-40b stablelm-3b pythia-70m pythia-12b gpt3-175b resnet-50 vit-l-16 "
    "bert-base bert-large"
)


def test_the_names():
    names = catalogue_names()
    assert set(ASKED.split()) <= set(names)
    assert len(names) == len(set(names)) > 100
    assert len(PUBLISHED) > 85


@pytest.mark.parametrize("name", [name for name in catalogue_names() if name not in CONVNETS])
def test_every_row_has_a_source_and_is_found_by_its_name(name):
    found = find_architecture(name)
    assert found is not None and found.name == name and found.source


@pytest.mark.parametrize("name", PUBLISHED)
def test_as_many_parameters_as_published(name):
    found = find_architecture(name)
    assert found is not None and parameter_count(found) == published_parameters(name)


@pytest.mark.parametrize(("name", "count"), KNOWN.items())
def test_well_known_totals(name, count):
    found = find_architecture(name)
    assert found is not None and parameter_count(found) == count


def test_the_175_billion_of_gpt3():
    found = find_architecture("gpt3")
    assert found is not None and round(parameter_count(found) / 1e9) == 175


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("Llama-3.1-70B-Instruct", "llama-3.1-70b"),
        ("LLAMA_3.1_8B", "llama-3.1-8b"),
        ("llama3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("llama2-7b", "llama-2-7b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("GPT2-XL", "gpt2-xl"),
        ("gpt-2", "gpt2"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-12b"),
        ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("microsoft/phi-1_5", "phi-1.5"),
        ("microsoft/Phi-3-mini-4k-instruct", "phi-3-mini"),
        ("google/gemma-2-2b-it", "gemma-2-2b"),
        ("google/gemma-2b", "gemma-2b"),
        ("bert-large-uncased", "bert-large"),
        ("EleutherAI/pythia-1b-deduped", "pythia-1b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("vit_l_16", "vit-l-16"),
        (" llama-3.1-8b ", "llama-3.1-8b"),
    ],
)
def test_names_as_people_write_them(written, name):
    found = find_architecture(written)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "written", ["", "llama", "llama-3.1-71b", "bert-base-cased", "mistral-7b-v0.9", "instruct", "resnet-50"]
)
def test_what_is_not_there_is_none(written):
    assert find_architecture(written) is None


def test_convnets_are_names_without_an_architecture():
    assert set(CONVNETS) <= set(catalogue_names())
    assert find_convnet("ResNet50") == "resnet-50" and find_convnet("gpt2") is None


def test_experts():
    found = find_architecture("mixtral-8x7b")
    assert found is not None and found.mixture is not None
    assert (found.mixture.experts, found.mixture.per_token, all(found.mixture.sparse)) == (8, 2, True)


def test_a_message_with_the_nearest_name():
    text = unknown_model_message("meta-llama/Llama-3.1-71B")
    assert "'meta-llama/Llama-3.1-71B'" in text and "did you mean 'llama-3.1-70b'?" in text
    assert "config.json" in text and "package.module:factory" in text
    assert "did you mean" not in unknown_model_message("zzzzzz")
    assert "did you mean 'qwen3-30b-a3b'?" in unknown_model_message("Qwen/Qwen3-30B")
    assert "(did you mean 'llama-3-8b', 'llama-3-70b', 'llama-3.1-8b'" in unknown_model_message("llama3")
    assert "'llama-30b'" not in unknown_model_message("llama3")


def test_facts_are_cheap_to_import():
    code = (
        "import sys, shardwise.model.catalogue, shardwise.hardware.parse_cluster as clusters\n"
        "shardwise.model.catalogue.find_architecture('gpt2'); clusters.parse_cluster('2x8xH100')\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'psutil', 'pynvml'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
