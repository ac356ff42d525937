"""What scripts put into user_content comes back as it was; what can't, is inert and said."""
import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import random
import uuid

import numpy
import pytest
import torch

from shardsmith import _core
from shardsmith.errors import Error
from shardsmith.smp.values import TAG, Encoder, Inert, Record
from shardsmith.smp.values_read import decode, read_values
from smp_helpers import make_models, run


def through(value, path, **options):
    """(what comes back, warnings), by way of a file that torch's restricted reader opens."""
    warnings, keep = [], []
    _core.write_values(str(path), Encoder(keep, warnings.append, **options).encode(value))
    del keep
    torch.load(path, weights_only=True, mmap=True)
    return read_values(str(path)), warnings


def same(a, b):
    """Of the same type, and equal, NaN too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [t.detach().reshape(-1).clone().view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bits[0].equal(bits[1])
    if isinstance(a, numpy.ndarray):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        if a.dtype == object:
            return all(same(x, y) for x, y in zip(a.ravel().tolist(), b.ravel().tolist()))
        return a.tobytes() == b.tobytes()
    if isinstance(a, numpy.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        if isinstance(a, collections.defaultdict) and a.default_factory is not b.default_factory:
            return False
        return len(a) == len(b) and all(same(x, y) and same(a[x], b[y]) for x, y in zip(a, b))
    if isinstance(a, argparse.Namespace):
        return same(vars(a), vars(b))
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b)) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
    if isinstance(a, float):
        return math.isnan(a) and math.isnan(b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    return a == b


class Random:
    """Nested content out of everything that is rebuilt."""

    def __init__(self, seed):
        self.r = random.Random(seed)

    def text(self):
        return "".join(self.r.choice(["a", "B", "/", "~", "#", ".", "é", "漢", "\n", "\0", "'", '"', "\U0001f600"]) for _ in range(self.r.randrange(6)))

    def key(self):
        return self.r.choice([self.text, self.text, lambda: self.r.randrange(-3, 300), lambda: (1, self.text()), lambda: None,
                              lambda: self.r.choice([True, 2.5, b"k", frozenset([1, 2])]), lambda: TAG, lambda: "__shardsmith__"])()

    def array(self):
        shape = tuple(self.r.randrange(4) for _ in range(self.r.randrange(3)))
        kind = self.r.choice(["f4", "f8", "i8", "u2", "?", "c16", "f2", ">i4", ">f8", "U5", "S3", "M8[ns]", "m8[s]", "i4,f8",
                              [("name", "U4"), ("at", "f4", (2,))], "g"])
        bits = self.r.randbytes(numpy.dtype(kind).itemsize * math.prod(shape))
        if kind in ("U5", "?") or isinstance(kind, list):
            return numpy.ones(shape, kind)
        return numpy.frombuffer(bits, kind).reshape(shape)

    def tensor(self):
        dtype = self.r.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64,
                               torch.float8_e4m3fn, torch.uint16])
        shape = [self.r.randrange(4) for _ in range(self.r.randrange(4))]
        value = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(self.r.randrange(99))).to(dtype)
        if value.dim() > 1 and self.r.random() < 0.5:
            value = value.transpose(0, -1)
        if dtype.is_floating_point and dtype.itemsize > 1 and self.r.random() < 0.3:
            value.requires_grad_()
        return value

    def leaf(self):
        r = self.r
        return r.choice([
            lambda: None, lambda: r.random() < 0.5, lambda: r.randrange(-10**6, 10**6), lambda: r.randrange(-2**200, 2**200),
            lambda: 2**3000 + 1, lambda: r.choice([math.nan, math.inf, -math.inf, -0.0, r.random(), 5e-324]), self.text,
            lambda: r.randbytes(r.randrange(5)), lambda: bytearray(b"\0x"), lambda: complex(math.nan, r.random()), self.tensor,
            self.array, lambda: r.choice([numpy.int8(-4), numpy.float64(0.1), numpy.bool_(True), numpy.complex64(1j), numpy.str_("né"),
                                          numpy.bytes_(b"x"), numpy.datetime64("2020-02-02T03:04"), numpy.longdouble(1) / 3,
                                          numpy.float16(2), numpy.zeros(1, "i4,f8")[0]]),
            lambda: pathlib.Path("/a") / "b c", lambda: datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
            lambda: datetime.date(2020, 2, 29), lambda: datetime.time(1, 2, 3), lambda: datetime.timedelta(-1, 5, 7),
            lambda: decimal.Decimal("1.10"), lambda: uuid.UUID(int=r.randrange(2**128)), lambda: range(3, 9, 2),
            lambda: torch.Size([1, 2]), lambda: torch.bfloat16, lambda: torch.device("cpu"), lambda: numpy.dtype("i4,f8"),
            lambda: "\ud800lone"])()

    def value(self, depth=0):
        r = self.r
        if depth > 4 or r.random() < 0.35:
            return self.leaf()

        def items():
            return [self.value(depth + 1) for _ in range(r.randrange(4))]

        def mapping():
            return {self.key(): item for item in items()}

        def counted():
            return collections.Counter({self.text(): r.randrange(9)})

        def grouped():
            return collections.defaultdict(r.choice([list, dict, int, None]), mapping())

        return r.choice([
            items, lambda: tuple(items()), mapping, mapping, lambda: collections.OrderedDict(mapping()), grouped, counted,
            lambda: collections.deque(items(), r.choice([None, 9])), lambda: argparse.Namespace(**{f"a{i}": v for i, v in enumerate(items())}),
            lambda: {self.text(), r.randrange(9), (1, 2), frozenset([3])}, lambda: frozenset([self.text(), 4]),
            lambda: self.objects(items())])()

    @staticmethod
    def objects(items):
        array = numpy.empty(len(items), dtype=object)
        for i, item in enumerate(items):
            array[i] = item
        return array


@pytest.mark.parametrize("part", range(6))
def test_random_content_comes_back(tmp_path, part):
    for seed in range(part * 40, part * 40 + 40):
        value = {"all": [Random(seed).value() for _ in range(4)]}
        expected = {"all": [Random(seed).value() for _ in range(4)]}
        found, warnings = through(value, tmp_path / "content.pt")
        assert same(value, expected), "the harness makes the same twice"
        assert same(found, expected), f"seed {seed}: {expected!r}\n{found!r}"
        assert warnings == []


def test_the_comparison_sees_differences():
    for a, b in ((1, True), (1.0, 1), ({"a": 1}, collections.OrderedDict(a=1)), ([1], (1,)), (0.0, -0.0), ({1}, frozenset([1])),
                 (numpy.int8(1), numpy.int16(1)), (torch.zeros(2), torch.zeros(2, dtype=torch.int32)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
                 (numpy.array([1, None]), numpy.array([1, 2], dtype=object)), (torch.zeros(1), torch.zeros(1) * -1)):
        assert not same(a, b) and not same(b, a)
        assert same(a, a) and same(b, b)


def test_tensors_that_share_memory_go_on_sharing_it(tmp_path):
    whole = torch.arange(1_000_000, dtype=torch.float32)
    other = whole.clone()
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    value = {"slice": whole[5000:6000], "base": base, "row": base[1], "column": base[:, 2], "again": base, "bits": base.view(torch.int32),
             "apart": [whole[:10], whole[10:20]], "strided": other[::1000]}
    found, _ = through(value, tmp_path / "f.pt")
    assert found["slice"].equal(whole[5000:6000]) and found["strided"].equal(other[::1000]) and found["column"].equal(base[:, 2])
    assert (tmp_path / "f.pt").stat().st_size < 20_000, "of a large storage only what is meant"
    found["base"][1, 2] = -7
    assert found["row"][2] == found["column"][1] == found["again"][1, 2] == -7
    assert found["bits"][1, 2] == torch.tensor(-7.0).view(torch.int32)
    found["apart"][0][9] = 99
    assert found["apart"][1][0] == 10
    # The file's own sharing, as torch sees it.
    theirs = torch.load(tmp_path / "f.pt", weights_only=True)
    assert theirs["row"].untyped_storage().data_ptr() == theirs["base"].untyped_storage().data_ptr()
    # Of a file that torch wrote.
    torch.save({"base": base, "row": base[1]}, tmp_path / "theirs.pt")
    theirs = read_values(str(tmp_path / "theirs.pt"))
    theirs["base"][1] = 5
    assert theirs["row"].tolist() == [5] * 4


def test_tensors_of_other_kinds(tmp_path):
    sparse = torch.sparse_coo_tensor([[0, 1], [2, 0]], [3.0, 4.0], (2, 3))
    value = {"sparse": sparse, "meta": torch.empty(2, device="meta"), "conj": torch.tensor([1 + 2j]).conj(), "parameter": torch.nn.Parameter(torch.ones(2)),
             "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "good": 1}
    found, warnings = through(value, tmp_path / "f.pt")
    assert found["sparse"].to_dense().equal(sparse.to_dense()) and found["conj"].equal(torch.tensor([1 - 2j]))
    assert found["parameter"].equal(torch.ones(2)) and found["good"] == 1
    assert isinstance(found["meta"], Inert) and found["meta"].state["shape"] == [2] and isinstance(found["quantized"], Inert)
    assert len(warnings) == 2 and "['meta']" in warnings[0] and "['quantized']" in warnings[1]


@dataclasses.dataclass
class Arguments:
    rate: float
    names: list
    inner: "Arguments | None" = None


class Colour(enum.Enum):
    RED = 3


Point = collections.namedtuple("Point", "x y")


class Odd:
    pass


def test_what_is_not_rebuilt_is_inert_and_said(tmp_path):
    loop = []
    loop.append(loop)
    deep = current = []
    for _ in range(400):
        current.append([])
        current = current[0]
    value = {"dataclass": Arguments(0.5, ["a"], Arguments(1.5, [])), "enum": Colour.RED, "point": Point(1, [2]), "odd": Odd(), "loop": loop,
             "function": math.sqrt, "lambda": lambda: 0, "class": Odd, "deep": deep, "factory": collections.defaultdict(lambda: 0, a=1),
             "masked": numpy.ma.MaskedArray([1, 2], [True, False]), "here": {"good": 1}}
    found, warnings = through(value, tmp_path / "f.pt")
    assert found["dataclass"].rate == 0.5 and found["dataclass"].names == ["a"] and found["dataclass"].inner.rate == 1.5
    assert found["dataclass"].class_name.endswith("Arguments")
    with pytest.raises(AttributeError, match="stand-in for .*Arguments has no weight"):
        found["dataclass"].weight
    assert found["enum"].state == 3 and found["point"] == (1, [2]) and found["point"].y == [2] and isinstance(found["point"], Record)
    assert found["function"].class_name == "math.sqrt" and isinstance(found["loop"][0], Inert) and found["here"] == {"good": 1}
    assert dict(found["factory"]) == {"a": 1} and found["factory"].default_factory is None
    assert found["masked"].tolist() == [None, 2] and found["masked"].data.tolist() == [1, 2]
    depth, current = 0, found["deep"]
    while isinstance(current, list):
        depth, current = depth + 1, current[0]
    assert depth > 30 and isinstance(current, Inert)
    for place in ("['dataclass']", "['dataclass']['inner']", "['enum']", "['odd']", "['loop'][0]", "['function']", "['lambda']", "['class']", "['factory']"):
        assert sum(line.startswith(f"user_content{place}:") for line in warnings) == 1, place
    # What came back inert is saved again as it is.
    again, warnings = through(found, tmp_path / "g.pt")
    assert again["dataclass"].inner.rate == 1.5 and again["odd"].class_name == found["odd"].class_name and again["point"].x == 1
    assert warnings == []


def test_configurations_of_transformers(tmp_path):
    import transformers

    class MyConfig(transformers.GPT2Config):
        model_type = "my"

    nested = transformers.LlavaConfig(text_config=transformers.LlamaConfig(hidden_size=64), vision_config=transformers.CLIPVisionConfig(hidden_size=24))
    args = argparse.Namespace(config=transformers.GPT2Config(n_embd=24), generation=transformers.GenerationConfig(max_length=77))
    found, warnings = through({"nested": nested, "args": args, "mine": MyConfig(n_embd=36)}, tmp_path / "f.pt")
    assert type(found["nested"]) is transformers.LlavaConfig and found["nested"].to_dict() == nested.to_dict()
    assert type(found["nested"].text_config) is transformers.LlamaConfig and found["nested"].text_config.hidden_size == 64
    assert type(found["args"].config) is transformers.GPT2Config and found["args"].config.n_embd == 24
    assert found["args"].generation.max_length == 77
    assert isinstance(found["mine"], Inert) and found["mine"].n_embd == 36 and len(warnings) == 1


def test_schedulers_state(tmp_path):
    class Warm:
        def __init__(self):
            self.steps = 5

        def __call__(self, step):
            return min(1.0, (step + 1) / self.steps)

    def schedulers(optimizer):
        return [torch.optim.lr_scheduler.LambdaLR(optimizer, [Warm()]), torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20), torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50),
                torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1), torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    def make():
        return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0, momentum=0.9)

    for number in range(len(schedulers(make()))):
        optimizers = [make(), make()]
        one, fresh = (schedulers(optimizer)[number] for optimizer in optimizers)
        for _ in range(7):
            optimizers[0].step()
            one.step()
        state, _ = through({"lr": one.state_dict(), "also": one.state_dict}, tmp_path / "f.pt")
        fresh.load_state_dict(state["lr"])
        optimizers[1].param_groups[0].update({k: v for k, v in optimizers[0].param_groups[0].items() if k != "params"})
        rates = []
        for optimizer, scheduler in zip(optimizers, (one, fresh)):
            rates.append([])
            for _ in range(9):
                optimizer.step()
                scheduler.step()
                rates[-1].append(optimizer.param_groups[0]["lr"])
        assert rates[0] == rates[1], type(one).__name__
        assert isinstance(state["also"], Inert)


def test_nonsense_in_a_file_is_an_error_that_says_so():
    for broken in ({TAG: "dtype", "name": "load"}, {TAG: "path"}, {TAG: "numpy_bytes", "descr": "|O", "shape": [1], "data": b"12345678"},
                   {TAG: "numpy_bytes", "descr": "<f4", "shape": [5], "data": b"1234"}, {TAG: "set", "items": [[1]]}, {TAG: "date", "iso": "x"},
                   {TAG: "numpy_scalar", "dtype": "O", "value": 1}, {TAG: "numpy_what"}, {TAG: "size", "items": "x"}, {TAG: "range", "bounds": [1, 2, 0]},
                   {TAG: "sparse_coo", "indices": torch.tensor([[9]]), "values": torch.ones(1), "size": [2]}, {TAG: "pairs", "items": [[[], 1]]}):
        with pytest.raises(Error, match="makes no sense") as caught:
            decode({"a": [broken]}, lambda name: name, "file.pt")
        assert caught.value.kind == "corrupt" and "file.pt" in str(caught.value)
    assert decode({TAG: "of a later version", "x": 1}, lambda name: name) == {TAG: "of a later version", "x": 1}


def test_files_for_others_have_plain_dicts(tmp_path):
    value = collections.OrderedDict(b=torch.ones(2), a=collections.OrderedDict(x=1))
    found, _ = through(value, tmp_path / "f.pt", ordered=False)
    assert type(found) is dict and list(found) == ["b", "a"] and type(found["a"]) is dict
    assert list(torch.load(tmp_path / "f.pt", weights_only=True)) == ["b", "a"]


def test_through_a_checkpoint(tmp_path):
    models = make_models(tmp_path)
    body = """
import collections, dataclasses, numpy
@dataclasses.dataclass
class Args:
    rate: float
start(1)
model = load("gpt2")
train_step(model, ids_of(0))
shared = torch.arange(4.0)
for number, content in enumerate(({"args": Args(0.5), "names": numpy.array(["a", "bc"]), "shared": [shared, shared[1:]], "o": collections.OrderedDict(z=1)},
                                  [1, 2], None, {}, 5)):
    smp.save_checkpoint(FOLDER + "/ck", f"c{number}", model=model, user_content=content)
    results[str(number)] = repr(smp.resume_from_checkpoint(FOLDER + "/ck", f"c{number}"))
    if number == 0:
        back = smp.resume_from_checkpoint(FOLDER + "/ck", "c0")
        results["rate"] = back["args"].rate
        back["shared"][0][2] = 9
        results["shared"] = back["shared"][1].tolist()
"""
    (found,) = run(body, 1, models, tmp_path / "out")
    assert found["rate"] == 0.5 and found["shared"] == [1, 9, 3] and "OrderedDict" in found["0"] and "array(['a', 'bc']" in found["0"]
    assert [found[str(n)] for n in range(1, 5)] == ["[1, 2]", "{}", "{}", "5"]
