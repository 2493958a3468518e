"""Checkpoints made to break the reader: each is refused with its file and reason, and nothing is waited for."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIG, config_of, folder, loaded, raw_archive, same_bits
from safetensors.torch import save_file
from test_convert_deepspeed import SHAPES, edit, write_zero
from test_convert_lora import adapter, base_model, pair
from test_convert_plain import reference
from test_convert_tensorfile import entry, handmade

from bridge.convert import MAX_SHARD_SIZE, convert, dcp, follow, inspect, parse_size, torchfile
from bridge.convert.commands import convert_file, inspect_path
from bridge.convert.formats import open_source
from bridge.convert.pickles import Global, Object, Sharded, StorageRef, TensorRef, read_pickle
from bridge.convert.plan import place
from bridge.convert.source import IncompleteError, blocks
from bridge.errors import UserError, printable

HUGE = 10**400
"""More digits than a float has room for, fewer than Python's own limit on decimal text."""


def refused(source: Path, out: Path, message: str, **options: Any) -> None:
    with pytest.raises(UserError, match=message):
        convert(source, out, **options)
    assert [path.name for path in out.parent.iterdir() if out.name in path.name] == []


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value, value]
    return value


# ---- torch.save files


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # 32 sizes of 1,000 bits: the number of elements has more digits than Python turns into text.
        (reference(f"I{2**1000}\n" * 32, "I0\n" * 32), "beyond 63 bits"),
        (reference("I0\n", "I1\n").replace(b"S'w'\n", b"I7\n"), "name 7, which is no text"),
        (reference("I6\n", "I1\n").replace(b"S'w'", b"S'" + b"module." * 40_000 + b"w'"), "280,001 characters"),
        (b"(" + b"".join(b"Np%d\n" % (i * (2**61 - 1)) for i in range(1, 9)) + b"l.", "too high a number"),
    ],
    ids=["elements", "number as name", "prefixes", "memo"],
)
def test_numbers_and_names_beyond_reason_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    refused(raw_archive(tmp_path / "src" / "x.pt", data, {"data/0": bytes(24)}), tmp_path / "out", message)


def test_a_step_of_a_dimension_of_one_element_may_be_anything(tmp_path: Path) -> None:
    want = torch.arange(6, dtype=torch.float32)[::2]
    data = reference("I1\nI3\n", f"I{2**62}\nI2\n")
    path = raw_archive(tmp_path / "src" / "x.pt", data, {"data/0": torch.arange(6.0).numpy().tobytes()})
    convert(path, tmp_path / "out")
    assert same_bits(loaded(tmp_path / "out")["w"], want.reshape(1, 3))


def test_one_dict_under_many_names_is_counted_once(tmp_path: Path) -> None:
    """Each of its entries was counted again for each name: a file of 1 MB kept the reader for many minutes."""
    held = dict.fromkeys(map(str, range(50_000)))
    state = {"w": torch.ones(2), **{f"extra{number}": held for number in range(50_000)}}
    convert(folder(tmp_path / "src", state), tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"w"}


@pytest.mark.parametrize("hard", [200, 60])
def test_more_files_than_the_soft_limit_allows_are_read(tmp_path: Path, hard: int) -> None:
    """1,024 files may be open where nobody raised the limit, and large trainings have more ranks than that."""
    src = tmp_path / "src"
    src.mkdir()
    (src / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for number in range(100):
        save_file({f"w{number}": torch.ones(1)}, src / f"m{number}.safetensors")
    weight_map = {f"w{number}": f"m{number}.safetensors" for number in range(100)}
    (src / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    command = [sys.executable, "-m", "bridge", "convert", str(src), str(tmp_path / "out")]
    limit = ["prlimit", f"--nofile=50:{hard}"]
    done = subprocess.run([*limit, *command], capture_output=True, encoding="utf-8", check=False)
    if hard > 100:
        assert done.returncode == 0, done.stderr
        assert len(loaded(tmp_path / "out")) == 100
    else:
        assert done.returncode == 2 and "Too many open files); raise ulimit -n" in done.stderr
        assert not (tmp_path / "out").exists()


def test_what_may_not_be_read_is_named_with_its_remedy(tmp_path: Path) -> None:
    """`Path.is_dir` raises where the folder above gives no right to look."""
    src = folder(tmp_path / "locked" / "src", {"w": torch.ones(2)})
    asked = {
        "file": lambda: convert_file(src, tmp_path / "out", "auto", None, "5GB"),
        "folder": lambda: convert_file(src.parent, tmp_path / "out", "auto", None, "5GB"),
        "inspect": lambda: inspect_path(src.parent),
        "output": lambda: convert(tmp_path, src.parent / "inner" / "out"),
    }
    (tmp_path / "locked").chmod(0)
    for name, ask in asked.items():
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                if os.getuid() == 0:  # who may read everything
                    os.setuid(65534)
                ask()
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        with os.fdopen(read, encoding="utf-8") as pipe:
            assert re.match("UserError: .*locked/src.*: Permission denied; check its rights", said := pipe.read()), (
                name,
                said,
            )
    (tmp_path / "locked").chmod(0o755)


@pytest.mark.parametrize("begun", [[], ["actor"], ["actor", "actor/huggingface"]])
def test_a_step_that_was_only_begun_gives_way_to_an_older_one(tmp_path: Path, begun: list[str]) -> None:
    want = {"w": torch.ones(2)}
    folder(tmp_path / "src" / "global_step_1" / "actor", want, "model_world_size_1_rank_0.pt")
    for name in ["", *begun]:
        (tmp_path / "src" / "global_step_2" / name).mkdir(parents=True, exist_ok=True)
    report = convert(tmp_path / "src", tmp_path / "out")
    assert same_bits(loaded(tmp_path / "out")["w"], want["w"])
    assert any("global_step_2" in warning and "newest whole step" in warning for warning in report.warnings)
    refused(tmp_path / "src" / "global_step_2", tmp_path / "again", "holds no checkpoint file")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.bin"])
def test_one_of_several_files_is_no_model(tmp_path: Path, name: str) -> None:
    path = folder(tmp_path / "src", {"w": torch.ones(2)}, name)
    if path.suffix == ".safetensors":
        save_file({"w": torch.ones(2)}, path)
    refused(path, tmp_path / "out", "one of the 2 files of a model; give their folder")


def test_an_empty_name_is_no_name(tmp_path: Path) -> None:
    refused(folder(tmp_path / "src", {"": torch.ones(2)}), tmp_path / "out", "'' is no name for a tensor")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_old_stream_may_be_of_any_protocol(tmp_path: Path, protocol: int) -> None:
    path = folder(tmp_path / "src", {})
    torch.save({"w": torch.arange(3)}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    convert(path, tmp_path / "out")
    assert same_bits(loaded(tmp_path / "out")["w"], torch.arange(3))


def test_a_pickle_that_fails_its_checksum_is_refused_and_none_is_none(tmp_path: Path) -> None:
    """One letter of a name is changed, which nothing else could notice."""
    content = {"weight": torch.ones(2)}
    changed = folder(tmp_path / "src", content)
    changed.write_bytes(changed.read_bytes().replace(b"weight", b"freight"[1:]))
    refused(changed, tmp_path / "out", "CRC-32")
    torch.serialization.set_crc32_options(False)
    try:
        plain = folder(tmp_path / "none", content)
    finally:
        torch.serialization.set_crc32_options(True)
    convert(plain, tmp_path / "out")
    assert list(loaded(tmp_path / "out")) == ["weight"]


def test_an_old_streams_list_of_storages_holds_text_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", {})
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    raw = path.read_bytes()
    at = read_pickle(raw, path).end
    for _ in range(3):
        at = read_pickle(raw, path, at).end
    path.write_bytes(raw[:at] + b"\x80\x02]]a." + raw[read_pickle(raw, path, at).end :])
    refused(path, tmp_path / "out", "list of storages is damaged")


@pytest.mark.parametrize("zipped", [True, False])
def test_cut_at_every_kilobyte(tmp_path: Path, zipped: bool) -> None:
    path = folder(tmp_path / "src", {})
    torch.save({f"w{n}": torch.ones(200) for n in range(20)}, path, _use_new_zipfile_serialization=zipped)
    raw = path.read_bytes()
    for size in range(0, len(raw), 1024):
        path.write_bytes(raw[:size])
        refused(path, tmp_path / "out", "checkpoint.pt")


def test_part_of_a_numbered_set_without_its_index_is_no_model(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    path = folder(tmp_path / "bin", tensors, "pytorch_model-00002-of-00003.bin")
    with pytest.raises(IncompleteError, match=r"2 of its 3 files are missing: pytorch_model-00001-of-00003\.bin"):
        convert(path.parent, tmp_path / "out")
    (tmp_path / "safe").mkdir()
    (tmp_path / "safe" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(tensors, tmp_path / "safe" / "model-00001-of-00002.safetensors")
    with pytest.raises(IncompleteError, match=r"1 of its 2 files are missing: model-00002-of-00002\.safetensors"):
        convert(tmp_path / "safe", tmp_path / "out")
    save_file({"v": torch.ones(2)}, tmp_path / "safe" / "model-00002-of-00002.safetensors")
    convert(tmp_path / "safe", tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"v", "w"}


def test_ten_thousand_tensors_in_small_files(tmp_path: Path) -> None:
    want = {f"layers.{n}.w": torch.full((3,), float(n)) for n in range(10_000)}
    convert(folder(tmp_path / "src", want), tmp_path / "out", max_shard_size=4_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 31
    got = loaded(tmp_path / "out")
    assert got.keys() == want.keys() and all(torch.equal(got[name], tensor) for name, tensor in want.items())


# ---- safetensors


def test_header_numbers_beyond_63_bits_are_refused(tmp_path: Path) -> None:
    most = 10**4300 - 1  # the longest that JSON's reader takes; one more digit cannot be shown
    refused(handmade(tmp_path / "src", {"a": entry("U8", (most,), (0, most))}), tmp_path / "out", "not described")


# ---- files beside the weights


@pytest.mark.parametrize(
    "name",
    ["model.safetensors.index.json", "pytorch_model.bin.index.json", "latest", "adapter_config.json", "config.json"],
)
def test_small_files_are_no_way_out_and_nothing_is_waited_for(tmp_path: Path, name: str) -> None:
    """A link to an endless device, a link to itself, a pipe that nobody writes into, and a folder."""
    source = folder(tmp_path / "src", {"a.lora_A": torch.ones(2, 2), "a.lora_B": torch.ones(2, 2)})
    path = source.parent / name
    if name == "adapter_config.json":
        source.rename(source.with_name("adapter_model.bin"))
    elif name in ("latest", "pytorch_model.bin.index.json"):
        source.unlink()
    makers: list[Callable[[], object]] = [
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ]
    for make in makers:
        path.unlink(missing_ok=True)
        make()
        refused(source.parent, tmp_path / "out", "src")
        if name not in ("config.json", "adapter_config.json"):  # which `inspect` goes without
            with pytest.raises(UserError, match="src"):
                inspect(source.parent)


def test_trackers_that_are_no_small_file_do_not_count(tmp_path: Path) -> None:
    folder(tmp_path / "src" / "global_step_2", {"w": torch.ones(1)})
    (tmp_path / "src" / "latest_checkpointed_iteration.txt").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "src" / "global_step_2" / "fsdp_config.json")
    assert inspect(tmp_path / "src")["step"] == 2


@pytest.mark.parametrize("name", ["x" * 300, "\ud800.bin", "\x1b[2J.bin"])
def test_index_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    source = folder(tmp_path / "src", {"w": torch.ones(1)}).parent
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (source / "checkpoint.pt").unlink(missing_ok=True)
        (source / index).write_text(json.dumps({"weight_map": {"w": name}}), encoding="utf-8")
        refused(source, tmp_path / "out", "too long|missing")
        (source / index).unlink()


def test_a_config_with_any_text_is_written_back(tmp_path: Path) -> None:
    path = folder(tmp_path / "src", {"w": torch.ones(1)}, note="half a pair \ud800, é, 漢")
    convert(path, tmp_path / "out")
    assert config_of(tmp_path / "out")["note"] == "half a pair \ud800, é, 漢"


def test_parents_are_those_of_the_folder_and_not_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "run" / "step", {"w": torch.ones(1)})
    (path.parent / "config.json").rename(tmp_path / "run" / "config.json")
    (path.parent / "here").mkdir()
    (path.parent / "here" / "config.json").write_text('{"wrong": 1}', encoding="utf-8")
    monkeypatch.chdir(path.parent / "here")
    convert(Path(".."), tmp_path / "out")
    assert "wrong" not in config_of(tmp_path / "out")


@pytest.mark.parametrize("inner", [False, True])
def test_the_vocabulary_is_the_embeddings(tmp_path: Path, inner: bool) -> None:
    tensors = {"model.embed_tokens.weight": torch.ones(64, 2), "lm_head.weight": torch.ones(64, 2)}
    path = folder(tmp_path / "src", tensors, **({"text_config": {"vocab_size": 60}} if inner else {}))
    report = convert(path, tmp_path / "out")
    config = config_of(tmp_path / "out")
    assert config["vocab_size"] == 64 and (not inner or config["text_config"]["vocab_size"] == 64)
    assert any("64 rows: vocab_size was set to that from 61" in warning for warning in report.warnings)


def test_the_vocabulary_stays_where_embeddings_differ_or_the_config_has_none(tmp_path: Path) -> None:
    tensors = {"encoder.embed_tokens.weight": torch.ones(64, 2), "decoder.embed_tokens.weight": torch.ones(9, 2)}
    convert(folder(tmp_path / "a", tensors), tmp_path / "out-a")
    assert config_of(tmp_path / "out-a")["vocab_size"] == 61
    convert(folder(tmp_path / "b", {"wte.weight": torch.ones(64, 2)}, vocab_size=None), tmp_path / "out-b")
    assert config_of(tmp_path / "out-b")["vocab_size"] is None


# ---- DeepSpeed, shards, adapters


@pytest.mark.parametrize(
    ("stage", "file", "changes", "message"),
    [
        (2, "mp_rank_00_model_states.pt", {"dp_world_size": 10**12}, "dp_world_size is 1000000000000"),
        (2, "mp_rank_00_model_states.pt", {"dp_world_size": -1}, "dp_world_size is -1"),
        (2, "mp_rank_00_model_states.pt", {"shared_params": {"x": []}}, "shares a parameter"),
        (2, "mp_rank_00_model_states.pt", {"param_shapes": [{"w": (1,) * 33}]}, "param_shapes"),
        (2, "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", {"partition_count": nested(100)}, "an unknown number"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", {"frozen_param_shapes": [1]}, "frozen_param_shapes"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", {"frozen_param_shapes": {"w": ("a",)}}, "frozen_param_shapes"),
        (3, "zero_pp_rank_0_mp_rank_00_model_states.pt", {"frozen_param_shapes": {7: (1,)}}, "frozen_param_shapes"),
    ],
)
def test_zero_states_with_odd_values(tmp_path: Path, stage: int, file: str, changes: Any, message: str) -> None:
    write_zero(tmp_path / "src", stage, 2, SHAPES)
    edit(tmp_path / "src" / "global_step9" / file, **changes)
    refused(tmp_path / "src", tmp_path / "out", message, dtype="float32")


def test_zero_3_without_ranks_and_without_their_number(tmp_path: Path) -> None:
    write_zero(tmp_path / "src", 3, 2, SHAPES)
    step = tmp_path / "src" / "global_step9"
    edit(step / "zero_pp_rank_0_mp_rank_00_model_states.pt", dp_world_size=None)
    for path in [*step.glob("*optim*"), step / "zero_pp_rank_1_mp_rank_00_model_states.pt"]:
        path.unlink()
    refused(tmp_path / "src", tmp_path / "out", "optim_states.pt")


@pytest.mark.parametrize("config", [{"lora_alpha": HUGE}, {"lora_alpha": 1e300}, {"alpha_pattern": {"q_proj": HUGE}}])
def test_an_alpha_that_no_float_holds_is_refused(tmp_path: Path, config: Any) -> None:
    base_model(tmp_path / "base")
    source = adapter(tmp_path / "src", pair("q_proj", 6, 6), **config)
    refused(source, tmp_path / "out", "the scale is unknown", base=tmp_path / "base")


# ---- the command line


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bridge", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False, timeout=60)


def test_names_reach_the_terminal_as_text(tmp_path: Path) -> None:
    content = {"w\x1b[2J": torch.ones(1), "half \ud800": 3}
    source = folder(tmp_path / os.fsdecode(b"not-utf8-\xff"), content).parent
    shown = cli("inspect", source)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout and "w\\x1b[2J" in shown.stdout, shown.stderr
    whole = cli("inspect", source, "--json")
    assert json.loads(whole.stdout)["dropped"] == ["half \ud800"], whole.stderr
    (source / "config.json").unlink()
    failed = cli("convert", source, tmp_path / "\x1b[2Jout")
    assert failed.returncode == 2 and "\x1b" not in failed.stderr and "no config.json" in failed.stderr
    assert printable("a\nb\x9b\ud800é") == "a\nb\\x9b\\ud800é"


def test_the_folder_that_is_followed_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "link").symlink_to("steps")
    with pytest.raises(UserError, match="name another output"):
        follow(tmp_path / "steps", tmp_path / "link", lambda _source, _out: pytest.fail("converted"), until=1)


@pytest.mark.parametrize("text", ["9" * 400 + "GB", "9" * 400])
def test_sizes_beyond_a_float(text: str) -> None:
    assert parse_size(text) > 10**390


# ---- structures

ODD: list[Any] = [
    *(None, True, -1, 0, 3, 2**70, 1.5, "", "x", b"x", "\ud800", (), (1,), ("a",), [], [1], {}, {"a": 1}),
    *(Global("torch.float32"), Global("torch.device"), Global("torch.complex128")),
    Object(Global("torch.Generator"), ()),
    TensorRef(StorageRef("0", "float32", 1), "float32", 0, (1,), (1,)),
    Sharded("DTensor", "device", (0,), None),
]


def parts(value: Any, found: list[tuple[Any, Any]], seen: set[int]) -> None:
    """(holder, key) of everything inside a value; a dict's keys are not touched."""
    if id(value) in seen or len(found) > 5_000:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(value)
    elif isinstance(value, list):
        inner = list(range(len(value)))
    elif isinstance(value, Object):
        inner = ["state", "arguments"]
    elif isinstance(value, Sharded):
        inner = ["state", "shape", "dtype"]
    for key in inner:
        found.append((value, key))
        parts(taken(value, key), found, seen)
    if isinstance(value, tuple):
        for item in value:
            parts(item, found, seen)


def taken(holder: Any, key: Any) -> Any:
    return holder[key] if isinstance(holder, (dict, list)) else getattr(holder, key)


def put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, (dict, list)):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value)


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("zero")
    for stage in (2, 3):
        write_zero(home / f"z{stage}", stage, 2)
    return home


@pytest.mark.parametrize("kind", ["actor", "dcp", "z2", "z3"])
def test_values_of_another_type_anywhere_are_refused_or_do_not_matter(
    saved: Path, zero: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the pickles hold is changed after they are read: in each trial one to three values become something odd."""
    where = zero / kind if kind.startswith("z") else saved / kind
    for seed in range(150):
        dice = random.Random(seed)
        chosen = dice.randrange(4)
        count = -1

        def odd(data: bytes, path: Path, start: int = 0, dice: random.Random = dice, chosen: int = chosen) -> Any:
            nonlocal count
            count += 1
            pickle = read_pickle(data, path, start)
            places: list[tuple[Any, Any]] = []
            parts(pickle.value, places, set())
            if count == chosen and places:
                for _ in range(dice.randint(1, 3)):
                    put(*dice.choice(places), dice.choice(ODD))
            return pickle

        monkeypatch.setattr(torchfile, "read_pickle", odd)
        monkeypatch.setattr(dcp, "read_pickle", odd)
        try:
            with open_source(where, dice.choice(["auto", "float32"])) as source:
                place(source.tensors, "auto", MAX_SHARD_SIZE)
                for tensor in source.tensors.values():
                    for block in blocks(tensor):
                        assert block.size
        except UserError as error:
            assert str(error), seed


@pytest.mark.parametrize(
    "content",
    [None, "/dev/zero", "[" * 100_000, '{"format": 1}', "null"]
    + [
        json.dumps({"kind": "model", "format": 1, "fingerprint": "", "made_by": "", "files": files, "summary": summary})
        for files, summary in [([], {}), ({"a": 3}, {}), ({"a": {}}, {}), ({}, 3)]
    ],
)
def test_a_seal_that_is_none_is_no_seal(tmp_path: Path, content: str | None) -> None:
    source = folder(tmp_path / "src", {"w": torch.ones(1)}).parent
    if content is None:
        os.mkfifo(source / "SEAL.json")
    elif content.startswith("/"):
        (source / "SEAL.json").symlink_to(content)
    else:
        (source / "SEAL.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"its SEAL\.json cannot be read"):
        inspect_path(source)
    convert_file(source, tmp_path / "out", "auto", None, "5GB")
