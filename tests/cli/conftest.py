import os
from pathlib import Path
import subprocess
import sys

import pytest

from bitsandbytes.cli import main


@pytest.fixture
def run_module(tmp_path):
    """Run `python -m bitsandbytes` in a process of its own, in an empty folder and without a network."""

    def run(*args, pythonpath="", python_args=()):
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, [str(pythonpath), root, os.environ.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, *python_args, "-m", "bitsandbytes", *args],
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )

    return run


@pytest.fixture
def command(capsys):
    """Run a command in this process; gives (exit status, standard output, standard error)."""

    def run(*args):
        status = main(args)
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama with a word tokenizer, as a Hugging Face directory."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    import torch

    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    words = "the harbour at end of peninsula had been built twice . wall stone water".split()
    vocabulary = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>"
    ).save_pretrained(directory)

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory
