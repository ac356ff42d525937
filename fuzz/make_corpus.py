"""Makes the fuzzers' kept corpus, fuzz/corpus/TARGET/*, out of what real writers write: torch.save of today and of
before 1.6, safetensors, torch.distributed.checkpoint, transformers' folders. How files are packed into one input:
fuzz/support.h. Inputs that once broke something (regression-*) stay. Run: .venv/bin/python fuzz/make_corpus.py"""

import hashlib
import io
import json
import pickle
import random
import shutil
import struct
import tempfile
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import save as save_safetensors

CORPUS = Path(__file__).resolve().parent / "corpus"
warnings.filterwarnings("ignore")


def put(target, name, data):
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def saved(value, **options):
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def records(data):
    """The records of a torch archive, without the folder before their names."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name.split("/", 1)[1], archive.read(name)) for name in archive.namelist()]


def rezip(data, compression, change=lambda name, content: content):
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", compression) as new:
        for name in archive.namelist():
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            new.writestr(info, change(name, archive.read(name)), compression)
    return out.getvalue()


def packed(files):
    return b"".join(b"@@@@" + name.encode() + b"\n" + content for name, content in files)


KEPT = ("data.pkl", "byteorder", "version")


def torch_parts(file, value, record=None):
    """A torch archive as the parts `file!record`, of those records that matter."""
    parts = [(f"{file}!{name}", content) for name, content in records(saved(value)) if name in KEPT or name[:5] == "data/"]
    return parts + ([(f"{file}!shardsmith", json.dumps(record).encode())] if record else [])


def counted(*shape, dtype=torch.float32):
    count = 1
    for n in shape:
        count *= n
    return torch.arange(1, count + 1).to(dtype).reshape(shape)


def states():
    base = counted(4, 6)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    for p in model.parameters():
        p.data = counted(*p.shape)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "plain": {"w": counted(2, 3), "b": counted(3)},
        "views": {"a": base, "b": base.t(), "c": base[1:3, 2:5], "d": base[:, :1].expand(4, 2), "e": torch.empty(0, 5)},
        "nested": {"model": model.state_dict(), "step": 7, "list": [1, 2.5, None, True, "text", (1, 2)], 3: {"x": counted(1)}},
        "optimizer": {"optimizer": optimizer.state_dict(), "parameter": torch.nn.Parameter(counted(2))},
        "kinds": {"size": torch.Size([1, 2]), "bytes": b"\x00\xff", "set": {1, 2}, "complex": 1 - 2j, "big": 1 << 80, "minus": -(1 << 70),
                  "dtype": torch.bfloat16, "device": torch.device("cpu"), "ordered": OrderedDict(a=1), "deep": [[[[[]]]]]},
        "dtypes": {str(t): counted(3, dtype=t) for t in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
                   torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16, torch.complex32)},
        "sparse": {"coo": counted(2, 2).to_sparse(), "csr": counted(2, 2).to_sparse_csr()},
        "quantized": {"t": torch.quantize_per_tensor(counted(2, 2), 0.5, 1, torch.quint8),
                      "c": torch.quantize_per_channel(counted(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8)},
        "tensor": counted(2, 2),
    }


def make_torch():
    for name, state in states().items():
        data = saved(state)
        put("pt", name, data)
        put("pt", f"{name}-old", saved(state, _use_new_zipfile_serialization=False))
        put("pt", f"{name}-packed", packed(torch_parts("f", state)))
        for mode in range(3):
            put("pickle", f"{name}-{mode}", bytes([mode]) + dict(records(data))["data.pkl"])
    plain = saved(states()["plain"])
    deflated = rezip(plain, zipfile.ZIP_DEFLATED)
    big = rezip(plain, zipfile.ZIP_STORED, lambda name, content: b"big" if name.endswith("byteorder") else content)
    for name, data in {"stored": plain, "deflated": deflated, "big-endian": big}.items():
        put("pt", name, data)
        put("zip", name, b"\0" + data)
        put("zip", f"{name}-checked", b"\1" + data)
    put("zip", "empty", b"\0" + rezip(saved(1), zipfile.ZIP_STORED)[-22:])
    values = [1, "text", [None, True, 1.5], {"a": (1, 2, 3, 4)}, {1, 2}, frozenset([1]), b"bytes", bytearray(b"x"), 1 << 90, -5, 1e300]
    for protocol in (2, 3, 4, 5):
        put("pickle", f"protocol-{protocol}", b"\0" + pickle.dumps(values, protocol))
        put("pickle", f"protocol-{protocol}-any", b"\2" + pickle.dumps([values, Path("x"), random.Random(1).random], protocol))


def tensor_slice(tensor, name, shape, offset, extent):
    return {"tensor": tensor, "name": name, "shape": shape, "offset": offset, "extent": extent}


def record(slices, extra=None):
    return {"version": 1, "block_size": 1 << 20, "covered": 0, "slices": slices, "extra": extra, "crc": ""}


def manifest(files, **fields):
    return {"format_version": 1, "save_id": "0123456789abcdef", "tag": "a", "step": 3, "time": 1.5, "world_size": 2, "pp": 2, "tp": 1,
            "rdp": 1, "placement": "DPT", "partition": [0, 1, 2], "model_config": None, "hf": "hf",
            "files": [{"name": name, "size": 1, "digest": "00000000", "tail": "00000000"} for name in files]} | fields


def make_ours():
    halves = [tensor_slice(0, "model/w", [4, 3], [2 * r, 0], [2, 3]) for r in range(2)]
    for name, header, slices, extra in [
        ("empty", 0, [], None),
        ("slices", 1618, halves, {"save_id": "x", "f": {"__kind__": "float", "value": "nan"}, "b": {"__kind__": "bytes", "hex": "00ff"}}),
        ("blocks", (2 << 20) + 5, halves[:1], [1, {"__kind__": "dtype", "name": "float32"}]),
    ]:
        content = record(slices, extra) | {"covered": header, "crc": "0badcafe" * -(-header // (1 << 20))}
        put("pt_record", name, struct.pack("<I", header) + json.dumps(content).encode())
    ranks = []
    for r in range(2):
        ranks += torch_parts(f"model_0_{r}.pt", {"w": counted(2, 3) + 10 * r, "step": torch.tensor(5.0)},
                             record([halves[r], tensor_slice(1, "model/step", [], [], [])]))
        ranks += torch_parts(f"rng_{r}.pt", {"seed": r, "state": counted(3, dtype=torch.uint8)}, record([]))
    ranks += torch_parts("optimizer_0_0.pt", {"state": {"w": {"exp_avg": counted(4, 3)}}, "param_groups": [{"lr": 0.1}]},
                         record([tensor_slice(0, "optimizer/state/w/exp_avg", [4, 3], [0, 0], [4, 3])]))
    ranks += torch_parts("user_content.pt", {"note": "x", "deep": {"a": [1, {"__shardsmith__": "set", "items": [1]}]}}, record([]))
    names = sorted({name.split("!")[0] for name, _ in ranks})
    put("partial", "two-ranks", packed([("manifest.json", json.dumps(manifest(names)).encode()), *ranks]))
    one = torch_parts("model_0_0.pt", {"w": counted(2)}, record([tensor_slice(0, "model/w", [2], [0], [2])]))
    alone = manifest(["model_0_0.pt"], world_size=1, pp=1, partition=[0, 1], model_config={"model_type": "gpt2"})
    put("partial", "one-rank", packed([("manifest.json", json.dumps(alone).encode()), *one]))
    put("partial", "manifest-alone", packed([("manifest.json", json.dumps(manifest([])).encode())]))
    full = record([tensor_slice(0, "w", [2], [0], [2])], {"save_id": "x", "full": manifest([], world_size=1, pp=1)})
    put("full", "weights", packed(torch_parts("f", {"w": counted(2)}, full)))
    full["extra"]["full"] = manifest(["user_content_f"])
    put("full", "companion", packed(torch_parts("f", {"w": counted(2)}, full) + torch_parts("user_content_f", {"x": 1}, record([]))))


def make_safetensors():
    for name, state, metadata in [
        ("plain", {"w": counted(2, 3), "b": counted(3, dtype=torch.int64)}, {"format": "pt"}),
        ("none", {}, {"a": "b"}),
        ("shapes", {"s": torch.tensor(1.5), "z": torch.empty(0, 3), "h": counted(3, dtype=torch.bfloat16), "e": counted(2, dtype=torch.float8_e5m2)}, None),
        ("tie", {"kept": counted(2)}, {"format": "pt", "other": "kept"}),
    ]:
        data = save_safetensors(state, metadata)
        put("safetensors", name, b"\0" + data)
        put("safetensors", f"{name}-fitted", b"\1" + data)


def make_hf():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    small = dict(vocab_size=5, bos_token_id=0, eos_token_id=0)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=2, n_head=1, n_positions=2, **small))
    llama = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=4, num_attention_heads=2, num_key_value_heads=1,
                                         intermediate_size=3, max_position_embeddings=4, tie_word_embeddings=True, **small))
    for name, model in {"gpt2": gpt2, "llama": llama}.items():
        state = {key: counted(*value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
        config = json.dumps({k: v for k, v in model.config.to_dict().items() if v is not None}).encode()
        put("hf", name, packed([("config.json", config), ("model.safetensors", save_safetensors(state))]))
        if name == "gpt2":
            put("hf", "gpt2-bin", packed([("config.json", config), *torch_parts("pytorch_model.bin", state)]))
    halves = {"a.safetensors": {"w": counted(2)}, "b.safetensors": {"b": counted(3)}}
    index = json.dumps({"metadata": {}, "weight_map": {"w": "a.safetensors", "b": "b.safetensors"}}).encode()
    shards = [(name, save_safetensors(state)) for name, state in halves.items()]
    config = ("config.json", b'{"model_type": "unknown"}')
    put("hf", "sharded", packed([config, ("model.safetensors.index.json", index), *shards]))
    put("hf", "sharded-alone", packed([("model.safetensors.index.json", index), *shards]))
    bins = index.replace(b".safetensors", b".bin")
    parts = torch_parts("a.bin", {"w": counted(2)}) + torch_parts("b.bin", {"b": counted(3)})
    put("hf", "sharded-bin", packed([config, ("pytorch_model.bin.index.json", bins), *parts]))
    put("hf", "link", packed([config, ("model.safetensors.index.json", index), ("link:a.safetensors", b"../secret"), shards[1]]))
    away = index.replace(b"a.safetensors", b"../secret")
    put("hf", "dotdot", packed([config, ("model.safetensors.index.json", away), shards[1]]))


def make_dcp():
    import torch.distributed.checkpoint as dcp

    scratch = Path(tempfile.mkdtemp())
    state = {"model": {"w": counted(3, 2), "b": counted(2, dtype=torch.bfloat16)}, "step": 4, "list": [counted(1), {"x": 1}]}
    dcp.save(state, checkpoint_id=scratch / "a", no_dist=True)
    files = [(path.name, path.read_bytes()) for path in sorted((scratch / "a").iterdir())]
    put("dcp", "folder", packed(files))
    put("pickle", "dcp", b"\1" + dict(files)[".metadata"])
    put("dcp", "metadata-alone", packed([files[0]]))
    put("dcp", "unfinished", packed(files[1:]))
    dcp.save({"w": counted(2)}, checkpoint_id=scratch / "b", no_dist=True)
    put("dcp", "one", packed([(path.name, path.read_bytes()) for path in sorted((scratch / "b").iterdir())]))
    pieces = []
    for i in range(2):
        info = json.dumps({"w": {"saved_offsets": [2 * i, 0]}})
        data = save_safetensors({"w": counted(2, 3) + 10 * i}, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"})
        pieces.append((f"shard-0000{i + 1}-model-00001-of-00001.safetensors", data))
    put("dcp", "hugging-face", packed(pieces))
    shutil.rmtree(scratch)


def make_resume():
    """What training runs of the model in fuzz/targets/resume.cc may leave behind."""
    import torch.distributed.checkpoint as dcp
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=2, n_head=1, n_positions=2, vocab_size=5, bos_token_id=0, eos_token_id=0))
    for parameter in model.parameters():
        parameter.data = counted(*parameter.shape)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    weights = {name: counted(*value.shape) for name, value in model.state_dict().items() if name != "lm_head.weight"}
    names = [name for name, _ in model.named_parameters()]
    by_name = optimizer.state_dict()
    by_name["state"] = {names[i]: entry for i, entry in by_name["state"].items()}
    by_name["param_groups"][0]["params"] = names
    kinds = {
        "weights": weights,
        "trainer": {"model": weights, "optimizer": optimizer.state_dict(), "step": 7, "args": {"lr": 0.1}},
        "words": {"model_state_dict": weights, "optimizer_state_dict": by_name, "epoch": 2},
        "wrapped": {"app": {"model": {f"module.{name}": value for name, value in weights.items()}, "optim": optimizer.state_dict()}},
        "lightning": {"state_dict": {f"model.{name}": value for name, value in weights.items()}, "callbacks": {}},
    }
    for name, state in kinds.items():
        put("resume", name, b"1" + packed(torch_parts("f", state)))
    put("resume", "position-without-names", b"0" + packed(torch_parts("f", kinds["trainer"])))
    put("resume", "safetensors", b"0" + packed([("model.safetensors", save_safetensors(weights)),
                                                ("config.json", b'{"model_type": "gpt2"}')]))
    scratch = Path(tempfile.mkdtemp())
    dcp.save({"model": {name: weights[name] for name in names[:3]}, "optimizer": {"state": {}, "param_groups": []}},
             checkpoint_id=scratch, no_dist=True)
    put("resume", "dcp", b"1" + packed([(path.name, path.read_bytes()) for path in sorted(scratch.iterdir())]))
    shutil.rmtree(scratch)
    logical = {"word_embedding.weight": counted(5, 2), "position_embedding.weight": counted(2, 2)}
    slices = [tensor_slice(i, f"model/{name}", list(value.shape), [0, 0], list(value.shape))
              for i, (name, value) in enumerate(logical.items())]
    full = record(slices, {"save_id": "x", "full": manifest([], world_size=1, pp=1)})
    put("resume", "ours", b"1" + packed(torch_parts("f", logical, full)))


def make_rest():
    texts = ['{"a": [1, -2.5e3, true, null, "\\u00e9\\n"], "b": {}}', "[]", "18446744073709551616", '{"__kind__": "float", "value": "nan"}',
             '[{"__kind__": "bytes", "hex": "00ff"}, {"__kind__": "complex", "real": 1.0, "imag": -0.0}, {"__kind__": "dtype", "name": "x"}]',
             '{"__kind__": "object", "class": "a.b", "state": [{"__kind__": "tensor", "index": 3}]}', "[" * 60 + "]" * 60]
    for i, text in enumerate(texts):
        put("json", str(i), text.encode())
    numbers = random.Random(1)
    for i in range(8):
        put("plan", str(i), numbers.randbytes(64 << (i % 3)))


def main():
    torch.manual_seed(0)
    for old in CORPUS.glob("*/*"):
        if not old.name.startswith("regression-"):
            old.unlink()
    for make in (make_torch, make_ours, make_safetensors, make_hf, make_dcp, make_resume, make_rest):
        make()
    seen, total = set(), 0
    for path in sorted(CORPUS.glob("*/*")):
        digest = (path.parent.name, hashlib.sha256(path.read_bytes()).digest())
        if digest in seen:
            path.unlink()
            continue
        seen.add(digest)
        total += path.stat().st_size
    print(f"{len(seen)} inputs, {total} bytes")


if __name__ == "__main__":
    main()
