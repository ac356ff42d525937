"""torch.save in every shape that it has: before 1.6, sparse and quantised tensors, attributes, subclasses."""

import collections
import struct
import warnings

import pytest
import torch
from test_formats import DTYPES, assert_same, described, random_tensor, raw, tool

warnings.filterwarnings("ignore", category=UserWarning)

OLD = {"_use_new_zipfile_serialization": False}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_files_from_before_the_zip_are_read(tmp_path, dtype):
    tensors = {"a": random_tensor(dtype, (5, 7)), "scalar": random_tensor(dtype, ()), "none": random_tensor(dtype, (0, 3))}
    tensors["transposed"] = tensors["a"].t()
    tensors["part"] = random_tensor(dtype, (40, 40))[3:9, 1:30:4]
    torch.save(tensors, tmp_path / "m.pt", **OLD)
    out, ours = described(tmp_path / "m.pt")
    assert out["format"] == "pt" and tool("detect", tmp_path / "m.pt").strip() == "pt"
    for name, tensor in tensors.items():
        assert_same(ours[name], tensor)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_old_files_keep_values_and_sharing(tmp_path, protocol):
    base = torch.arange(12.0)
    value = {"w": base.reshape(3, 4), "tied": base.reshape(3, 4), "model": torch.nn.Linear(3, 2).state_dict(), "text": "x" * 2_000_000}
    torch.save(value, tmp_path / "m.pt", pickle_protocol=protocol, **OLD)
    _, ours = described(tmp_path / "m.pt")
    assert ours["tied"]["alias_of"] == "w"
    assert_same(ours["model/weight"], value["model"]["weight"])
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert back["text"] == value["text"] and back["tied"].data_ptr() == back["w"].data_ptr()


def test_old_files_are_little_endian_whatever_they_say(tmp_path):
    torch.save({"w": torch.arange(3.0)}, tmp_path / "m.pt", **OLD)
    data = (tmp_path / "m.pt").read_bytes()
    key = data.index(b"little_endian")
    true = data.index(b"\x88", key)
    (tmp_path / "m.pt").write_bytes(data[:true] + b"\x89" + data[true + 1 :])
    real = torch.load(tmp_path / "m.pt", weights_only=True)
    _, ours = described(tmp_path / "m.pt")
    assert_same(ours["w"], real["w"])
    assert real["w"].equal(torch.arange(3.0))


def test_old_files_that_are_cut_or_damaged_are_one_clear_line(tmp_path):
    torch.save({"w": torch.arange(100.0), "b": torch.ones(3)}, tmp_path / "m.pt", **OLD)
    data = (tmp_path / "m.pt").read_bytes()
    for n in (14, 50, len(data) // 2, len(data) - 1):
        (tmp_path / "m.pt").write_bytes(data[:n])
        assert "truncated" in tool("read", tmp_path / "m.pt", code=5)
    count = data.index(struct.pack("<q", 100))
    (tmp_path / "m.pt").write_bytes(data[:count] + struct.pack("<q", 2**62) + data[count + 8 :])
    assert str(2**62) in tool("read", tmp_path / "m.pt", code=5)


def sparse_tensors():
    dense = torch.zeros(6, 8)
    dense[1, 2], dense[3, 7], dense[5, 0] = 1.5, -2, 3
    coo = torch.sparse_coo_tensor([[1, 1, 4], [2, 2, 5]], torch.tensor([1.0, 2, 3]), (6, 8))  # not coalesced
    return {
        "coo": dense.to_sparse(),
        "twice": coo,
        "hybrid": torch.sparse_coo_tensor([[0, 2]], torch.arange(8, dtype=torch.int64).reshape(2, 4), (3, 4)),
        "empty": torch.sparse_coo_tensor(size=(3, 4)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 4)),
        "bsc": dense.to_sparse_bsc((3, 2)),
    }


def same_sparse(a, b):
    assert a.layout == b.layout and a.shape == b.shape and a.dtype == b.dtype
    if a.layout == torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced()
        return a._indices().equal(b._indices()) and a._values().equal(b._values())
    rows = a.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts = ("crow_indices", "col_indices", "values") if rows else ("ccol_indices", "row_indices", "values")
    return all(getattr(a, part)().equal(getattr(b, part)()) for part in parts)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_sparse_tensors_are_listed_and_come_back(tmp_path, old):
    tensors = sparse_tensors()
    torch.save({"s": tensors, "dense": torch.ones(2)}, tmp_path / "m.pt", **(OLD if old else {}))
    out, ours = described(tmp_path / "m.pt")
    assert_same(ours["s/coo/indices"], tensors["coo"].indices())
    assert_same(ours["s/coo/values"], tensors["coo"].values())
    assert_same(ours["s/csr/crow_indices"], tensors["csr"].crow_indices())
    assert_same(ours["s/bsc/values"], tensors["bsc"].values())
    assert out["values"]["s"]["coo"]["class"] == "torch.sparse_coo"
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert back["dense"].equal(torch.ones(2))
    for name, tensor in tensors.items():
        assert same_sparse(back["s"][name], tensor), name


def quantised_tensors():
    x = torch.linspace(-3, 3, 24).reshape(4, 6)
    scales, zeros = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64), torch.tensor([0, 1, -2, 3])
    per_tensor = torch.quantize_per_tensor(x, 0.1, 10, torch.quint8)
    return {
        "quint8": per_tensor,
        "qint8": torch.quantize_per_tensor(x, 0.25, -3, torch.qint8),
        "qint32": torch.quantize_per_tensor(x, 1e-6, 0, torch.qint32),
        "per_channel": torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8),
        "view": per_tensor[1:3],
        "again": per_tensor,
    }


@pytest.mark.parametrize("old", [False, True], ids=["zip", "old"])
def test_quantised_tensors_are_listed_and_come_back(tmp_path, old):
    tensors = quantised_tensors()
    torch.save(tensors, tmp_path / "m.pt", **(OLD if old else {}))
    _, ours = described(tmp_path / "m.pt")
    assert ours["qint8"]["dtype"] == "qint8"
    assert_same({**ours["qint8"], "dtype": "int8"}, tensors["qint8"].int_repr())
    assert_same(ours["per_channel/scales"], tensors["per_channel"].q_per_channel_scales())
    assert_same(ours["per_channel/zero_points"], tensors["per_channel"].q_per_channel_zero_points())
    assert ours["again"]["alias_of"] == "quint8"
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].qscheme() == tensor.qscheme(), name
        assert back[name].int_repr().equal(tensor.int_repr()), name
        assert back[name].dequantize().equal(tensor.dequantize()), name


def test_python_attributes_don_t_hinder(tmp_path):
    tensor = torch.arange(6.0)
    tensor.note = "mine"
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.sharded = {"rank": 1}
    sparse = torch.eye(3).to_sparse()
    sparse.note = 1
    buffer = torch.nn.Buffer(torch.zeros(2))
    torch.save({"t": tensor, "p": parameter, "s": sparse, "b": buffer}, tmp_path / "m.pt")
    _, ours = described(tmp_path / "m.pt")
    assert_same(ours["t"], tensor)
    assert_same(ours["p"], parameter)
    assert_same(ours["b"], buffer)
    assert_same(ours["s/values"], sparse.values())


def test_all_that_weights_only_knows_is_read_and_written(tmp_path):
    value = {
        "counter": collections.Counter("aab"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "bytearray": bytearray(b"\x00\xff"),
        "complex": 1 + 2j,
        "devices": [torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")],
        "size": torch.Size([2, 3]),
        "set": {1, 2},
        "dtypes": [torch.float32, torch.float8_e8m0fnu, torch.quint4x2, torch.uint7, torch.int1, torch.bits8, torch.float4_e2m1fn_x2],
        "schemes": [torch.per_tensor_affine, torch.per_channel_affine_float_qparams],
        "layouts": [torch.strided, torch.sparse_csr],
    }
    torch.save(value, tmp_path / "m.pt")
    assert torch.load(tmp_path / "m.pt", weights_only=True) == value
    tool("copy", tmp_path / "m.pt", tmp_path / "ours.pt")
    back = torch.load(tmp_path / "ours.pt", weights_only=True)
    assert back.pop("bytearray") == bytes(value.pop("bytearray"))
    assert back == value


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls):
        return torch.Tensor._make_wrapper_subclass(cls, (2, 3))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def test_wrapper_subclasses_are_named(tmp_path):
    torch.save({"x": Wrapper()}, tmp_path / "m.pt")
    assert "Wrapper" in tool("read", tmp_path / "m.pt", code=5)


def test_packed_four_bit_numbers_are_named(tmp_path):
    x = torch.quantize_per_channel(torch.rand(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)
    torch.save({"x": x}, tmp_path / "m.pt")
    assert "QUInt4x2" in tool("read", tmp_path / "m.pt", code=2)


def test_bare_pickles_are_recognised(tmp_path):
    import pickle

    for protocol in (2, 3, 4, 5):
        (tmp_path / "p").write_bytes(pickle.dumps({"x": Wrapper, "y": [1, collections.deque([2])]}, protocol))
        assert tool("detect", tmp_path / "p").strip() == "pickle"
        names = tool("names", tmp_path / "p")
        assert "Wrapper" in names and "collections.deque" in names


def test_raw_bits_are_the_same_after_two_copies(tmp_path):
    tensors = {str(dtype): random_tensor(dtype, (9, 4)).t() for dtype in DTYPES}
    torch.save(tensors, tmp_path / "m.pt", **OLD)
    tool("copy", tmp_path / "m.pt", tmp_path / "a.pt")
    tool("copy", tmp_path / "a.pt", tmp_path / "b.pt", "--plain")
    back = torch.load(tmp_path / "b.pt", weights_only=True, mmap=True)
    for name, tensor in tensors.items():
        assert raw(back[name]) == raw(tensor) and back[name].dtype == tensor.dtype
