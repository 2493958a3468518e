"""A model folder is whole or absent: kills, full disks, two writers, and what else a folder must be."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import config_of, folder, loaded, same_bits

from bridge.convert import convert, inspect, write_into
from bridge.errors import UserError

PYTHON = [sys.executable, "-c"]
CONTENT = {"model": {f"model.w{n}": torch.full((256, 256), float(n)) for n in range(8)}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return folder(tmp_path / "src", CONTENT)


def listed(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def run(script: str, *arguments: Path) -> "subprocess.CompletedProcess[str]":
    preface = "import sys, os, resource\nfrom pathlib import Path\nfrom bridge.convert import convert\n"
    preface += "source, out = map(Path, sys.argv[1:3])\n"
    return subprocess.run(
        [*PYTHON, preface + script, *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_a_kill_in_the_middle_leaves_no_output_and_the_next_run_cleans_up(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "odd [name]* 'x"
    killed = run(
        "convert(source, out, progress=lambda done, all: done * 2 > all and os.kill(os.getpid(), 9))", source, out
    )
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    assert [name for name in listed(tmp_path) if ".tmp-" in name]
    convert(source, out)
    assert listed(tmp_path) == sorted([out.name, "src"])
    assert set(loaded(out)) == set(CONTENT["model"])


def test_an_interrupt_leaves_nothing(source: Path, tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", progress=stop)
    assert listed(tmp_path) == ["src"]


def test_what_is_at_the_output_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = listed(tmp_path)
    for name in ("file", "folder", "link"):
        with pytest.raises(UserError, match=f"{name}: exists already"):
            convert(source, tmp_path / name)
    assert listed(tmp_path) == before
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"


def test_of_two_converters_the_later_one_is_refused(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def other_wins(done: int, total: int) -> None:
        if done == total:
            assert run("convert(source, out, dtype='bfloat16')", source, out).returncode == 0

    with pytest.raises(UserError, match="is there already"):
        convert(source, out, progress=other_wins)
    assert listed(tmp_path) == ["out", "src"]
    assert config_of(out)["dtype"] == "bfloat16"


def test_a_file_size_limit_leaves_nothing(source: Path, tmp_path: Path) -> None:
    limited = run(
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))\n"
        "from bridge.errors import UserError\n"
        "try: convert(source, out)\n"
        "except UserError as error: print(error)",
        source,
        tmp_path / "out",
    )
    assert "File too large; nothing was written" in limited.stdout, limited.stderr
    assert listed(tmp_path) == ["src"]


def test_a_full_disk_leaves_nothing(source: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(small)], capture_output=True)
    if mount.returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    try:
        with pytest.raises(UserError, match=r"needs 2,09\d,\d+ bytes and 1,\d+,\d+ are free"):
            convert(source, small / "out")

        def fill(done: int, total: int) -> None:
            (small / "filler").write_bytes(bytes(840_000))

        # 600 kB fit at the start; somebody else takes the room after the first tensor.
        smaller = folder(tmp_path / "half", {f"w{n}": torch.ones(30_000) for n in range(5)})
        with pytest.raises(UserError, match="No space left on device"):
            convert(smaller, small / "out", progress=fill)
        assert listed(small) == ["filler"]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_outputs_that_cannot_be_made(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent: is no folder"):
        convert(source, tmp_path / "absent" / "out")
    with pytest.raises(UserError, match="nothing was written"):
        convert(source, Path("/proc/out"))


def test_bad_requests_are_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    for settings, message in [
        ({"dtype": "int8"}, "dtype 'int8' is unknown; use auto, float32, bfloat16, float16"),
        ({"max_shard_size": 0}, "max shard size 0"),
        ({"base": tmp_path / "absent"}, "base model is no folder"),
    ]:
        with pytest.raises(UserError, match=message):
            convert(source, tmp_path / "out", **settings)
    for call in (lambda: convert(tmp_path / "none.pt", tmp_path / "out"), lambda: inspect(tmp_path / "none.pt")):
        with pytest.raises(UserError, match="does not exist"):
            call()
    assert listed(tmp_path) == ["src"]


def test_a_source_that_changes_meanwhile_is_refused(source: Path, tmp_path: Path) -> None:
    def touch(done: int, total: int) -> None:
        os.utime(source, ns=(1, 1))

    with pytest.raises(UserError, match="was changed while it was read"):
        convert(source, tmp_path / "out", progress=touch)
    assert listed(tmp_path) == ["src"]


def test_a_source_that_is_deleted_meanwhile_is_still_read(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", progress=lambda *_: source.unlink(missing_ok=True))
    assert set(loaded(tmp_path / "out")) == set(CONTENT["model"])


def test_modes_follow_the_umask(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        convert(source, tmp_path / "out", max_shard_size=10**6)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()} == {0o640}


def test_progress_counts_bytes_up_to_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "out", dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n * 131072, 8 * 131072) for n in range(1, 9)]


def test_write_into_fills_a_folder_and_publishes_nothing(source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    report = write_into(source, tmp_path / "mine")
    assert listed(tmp_path / "mine") == ["config.json", "model.safetensors"]
    assert listed(tmp_path) == ["mine", "src"]
    assert report.to_json() == {
        "format": "torch",
        "tensors": 8,
        "bytes": 2**21,
        "files": 1,
        "dtype": "float32",
        "tied": [],
        "dropped": [],
        "warnings": ["no tokenizer files were found; name a model folder that has them as the base (--base)"],
    }


def test_files_beside_the_weights_are_found_in_order(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    source = folder(run_folder / "checkpoints" / "step-10", CONTENT)
    (source.parent / "config.json").unlink()
    (source.parent / "huggingface").mkdir()
    base = tmp_path / "base"
    base.mkdir()
    for path, text in {
        source.parent / "huggingface" / "generation_config.json": "{}",
        run_folder / "config.json": json.dumps({"architectures": ["A"], "from": "run"}),
        run_folder / "tokenizer.json": "run",
        run_folder / "spiece.model": "run",
        base / "config.json": json.dumps({"from": "base"}),
        base / "tokenizer.json": "base",
        base / "chat_template.jinja": "base",
        base / "preprocessor_config.json": "base",
        tmp_path / "merges.txt": "three folders up",
    }.items():
        path.write_text(text, encoding="utf-8")
    report = convert(source, tmp_path / "out", base=base)
    out = tmp_path / "out"
    assert listed(out) == [
        "config.json", "generation_config.json", "model.safetensors", "preprocessor_config.json", "spiece.model",
        "tokenizer.json",
    ]  # fmt: skip
    assert config_of(out)["from"] == "run"
    assert (out / "tokenizer.json").read_text(encoding="utf-8") == "run"
    assert report.warnings == [
        f"config.json, tokenizer.json, spiece.model taken from {run_folder}",
        f"preprocessor_config.json taken from {base}",
    ]


def test_configs_that_do_not_serve(tmp_path: Path) -> None:
    source = folder(tmp_path / "a" / "b" / "c" / "src", CONTENT)
    config = source.parent / "config.json"
    for text, message in [("{", "no valid JSON"), ("[]", "no JSON object"), ("[" * 100_000, "no valid JSON")]:
        config.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            convert(source, tmp_path / "out")
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="no valid JSON"):
        convert(source, tmp_path / "out")
    config.unlink()
    with pytest.raises(UserError, match=r"no config\.json here"):
        convert(source, tmp_path / "out")
    (tmp_path / "secret.json").write_text("{}", encoding="utf-8")
    config.symlink_to(tmp_path / "secret.json")
    with pytest.raises(UserError, match="link that leads out"):
        convert(source, tmp_path / "out")


def test_neither_torch_nor_transformers_is_imported(source: Path, tmp_path: Path) -> None:
    done = run(
        "convert(source, out, dtype='bfloat16')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules",
        source,
        tmp_path / "out",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_memory_does_not_grow_with_the_model(tmp_path: Path, dtype: str) -> None:
    """Peak resident memory over that of a small conversion, for 100 MB with a transposed 60 MB tensor."""

    def peak(path: Path, out: str) -> int:
        script = f"convert(source, out, dtype='{dtype}')\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        return int(run(script, path, tmp_path / out).stdout) * 1024

    large = {"a": torch.zeros(10_000_000), "b": torch.zeros(3000, 5000).t()}
    small = peak(folder(tmp_path / "small", {"a": torch.zeros(10)}), "s")
    assert peak(folder(tmp_path / "large", large), "l") - small < 48 << 20


def test_transformers_loads_the_folder_bit_for_bit(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).eval()
    source = tmp_path / "src"
    source.mkdir()
    config.save_pretrained(source)
    model.generation_config.save_pretrained(source)
    torch.save({"model": {f"module.{k}": v for k, v in model.state_dict().items()}}, source / "checkpoint.pt")
    for dtype, shard in (("auto", 10**9), ("bfloat16", 20_000)):
        out = tmp_path / dtype
        report = convert(source, out, dtype=dtype, max_shard_size=shard)
        assert report.tied == ["lm_head.weight"]
        again, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        want = {name: tensor.to(again.dtype) for name, tensor in model.state_dict().items()}
        assert again.dtype == (torch.float32 if dtype == "auto" else torch.bfloat16)
        assert all(same_bits(tensor, want[name]) for name, tensor in again.state_dict().items())
        assert again.config.tie_word_embeddings and again.lm_head.weight is again.model.embed_tokens.weight
        if dtype == "auto":
            ids = torch.arange(20).reshape(2, 10)
            with torch.no_grad():
                assert torch.equal(again.eval()(ids).logits, model(ids).logits)
