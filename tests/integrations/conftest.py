import contextlib
import logging
import os

# Before any library reads them: no test may reach for the network.
os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    WANDB_DISABLED="true",
)

import pytest
import torch

from . import models


@pytest.fixture(autouse=True, scope="session")
def quiet_libraries():
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with contextlib.suppress(ImportError):
        import diffusers

        diffusers.logging.set_verbosity_error()
        diffusers.utils.logging.disable_progress_bar()
    for name in ("accelerate", "peft", "torch.distributed"):
        logging.getLogger(name).setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def device():
    """Where the models live: the device type in BNB_TEST_DEVICE, or the CPU."""
    return models.DEVICE


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Directory of a tiny random Llama in bfloat16, with 14 Linear layers besides the head."""
    return models.save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def llama_logits(llama):
    """Logits of that model in floating point."""
    return models.logits(models.load(llama))


@pytest.fixture(params=models.KINDS, ids=str)
def kind(request):
    """4-bit and int8."""
    return request.param


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
