"""Python objects between ranks: what arrives is what was sent, over every group; and who is named where nobody comes."""
from __future__ import annotations

import json

import pytest

from smp_helpers import Ranks, run

# Each builds its value anew, so that sender and receiver can compare.
VALUES = """
import argparse, collections, dataclasses, datetime, decimal, pathlib, uuid
import numpy
Point = collections.namedtuple("Point", "x y")
VALUES = {
    "plain": lambda: [None, True, -3, 2.5, "text", "\\ud800", b"bytes", 2**80, (1, [2, {"a": {}, 3: (), None: {1, 2}}])],
    "nan": lambda: [float("inf"), -0.0],
    "tagged": lambda: [complex(1, -2), bytearray(b"x"), pathlib.Path("a/b"), datetime.datetime(2024, 5, 6, 7, 8), datetime.timedelta(3),
                       decimal.Decimal("1.20"), uuid.UUID(int=5), range(2, 9, 3), frozenset({1}), {"__shardsmith_kind__": "mine"}],
    "containers": lambda: [collections.OrderedDict(b=1, a=2), collections.defaultdict(list, x=[1]), collections.Counter("aab"),
                           collections.deque([1, 2], 5)],
    "namespace": lambda: argparse.Namespace(lr=1e-3, layers=[1, 2], where=pathlib.Path("x")),
    "torch": lambda: [torch.float16, torch.device("cpu"), torch.Size([2, 3])],
    "numpy": lambda: [numpy.int64(5), numpy.float32(0.1), numpy.arange(6).reshape(2, 3), numpy.array(["a", "bc"])],
    "pickled": lambda: Point(1, [2]),
}
TENSORS = {
    "kinds": lambda: [torch.arange(6, dtype=d).reshape(2, 3) for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)],
    "odd": lambda: [torch.tensor(3.5), torch.empty(0, 4), torch.tensor([True, False]), torch.ones(3, 4).t()[1:], torch.tensor([1 + 2j]).conj()],
    "nested": lambda: {"a": [torch.ones(2), (torch.zeros(1), 3)]},
    "sparse": lambda: torch.eye(3).to_sparse(),
}

def same(one, other):
    if isinstance(one, torch.Tensor):
        return (type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape and one.layout == other.layout
                and torch.equal(one.to_dense(), other.to_dense()))
    if isinstance(one, numpy.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and numpy.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other and repr(one) == repr(other)
"""


@pytest.fixture(scope="module")
def nothing(tmp_path_factory):
    return tmp_path_factory.mktemp("no-models")


def test_what_arrives_is_what_was_sent(nothing, tmp_path):
    found = run(VALUES + """
import logging, pickle
from transformers import GPT2Config
start(2)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("shardsmith.smp").addHandler(handler)
plain_pickles = []
results["wrong"] = []
for name, make in {**VALUES, **TENSORS}.items():
    if RANK == 0:
        smp.broadcast(make(), smp.WORLD)
        back = smp.recv_from(1, smp.RankType.PP_RANK)
    else:
        back = smp.recv_from(0, smp.RankType.WORLD_RANK)
        smp.send(back, 0, smp.PP_RANK)
    gathered = smp.allgather([RANK, make()], smp.CommGroup.PP_GROUP)
    if not same(make(), back) or [item[0] for item in gathered] != [0, 1] or not all(same(make(), item[1]) for item in gathered):
        results["wrong"].append([name, repr(back), repr(gathered)])
parameter = smp.allgather(torch.nn.Parameter(torch.ones(2), requires_grad=False))[1 - RANK]
results["parameter"] = [type(parameter).__name__, parameter.requires_grad]
config = smp.allgather(GPT2Config(n_layer=3))[1 - RANK]
results["config"] = [type(config).__name__, config.n_layer]
smp.allgather(Point(1, 2))
results["said"] = [text for text in said if "pickled" in text]
results["meta"] = refusal(smp.send, torch.empty(2, device="meta"), 1 - RANK)
results["lambda"] = refusal(smp.send, lambda: 0, 1 - RANK)
results["self"] = refusal(smp.send, 1, RANK)
results["far"] = refusal(smp.recv_from, 7, smp.TP_RANK)
results["word"] = refusal(smp.broadcast, 1, "PP_GROUP")
smp.barrier()
""", 2, nothing, tmp_path)
    for ours in found:
        assert ours["wrong"] == []
        assert ours["parameter"] == ["Parameter", False] and ours["config"] == ["GPT2Config", 3]
        assert len(ours["said"]) == 1 and "Point" in ours["said"][0] and "said once" in ours["said"][0]
        for key, words in {"meta": "meta device", "lambda": "can't be sent", "self": "this rank itself", "far": "no tp rank 7",
                           "word": "smp.CommGroup"}.items():
            assert ours[key][0] == "invalid_argument" and words in ours[key][1], ours[key]


def test_only_objects_of_unknown_classes_are_pickled(nothing, tmp_path):
    (found,) = run(VALUES + """
from shardsmith.smp import message
start()
results["pickled"] = {}
for name, make in {**VALUES, **TENSORS}.items():
    told = []
    message.pack(make(), told.append)
    results["pickled"][name] = told
evil = message.Message(__import__("pickle").dumps((print, [])), [])
results["refused"] = refusal(message.unpack, evil, torch.device("cpu"))
""", 1, nothing, tmp_path)
    assert {name for name, told in found["pickled"].items() if told} == {"pickled"}
    assert found["refused"][0] == "corrupt" and "print" in found["refused"][1]


@pytest.mark.parametrize("degrees, kinds", [
    ({"pipeline_parallel_degree": 2}, ["pp", "rdp", "dp", "mp", "world"]),
    ({"tensor_parallel_degree": 2, "placement_strategy": "spread"}, ["tp", "rdp", "dp", "mp", "world"]),
])
def test_every_group_and_every_sender_in_it(nothing, tmp_path, degrees, kinds):
    found = run(f"""
smp.init({{**{degrees!r}, "ddp": True, "peer_timeout": 60}})
results["heard"] = {{}}
for kind in {kinds!r}:
    group = smp.CommGroup(kind)
    rank_type = smp.RankType(kind)
    members = list(range(WORLD)) if kind == "world" else getattr(smp, f"get_{{kind}}_group")()
    own = members.index(RANK)
    heard = []
    for sender in range(len(members)):
        if sender == own:
            smp.broadcast(["from", RANK], group)
        else:
            heard.append(smp.recv_from(sender, rank_type) == ["from", members[sender]])
    others = smp.allgather(RANK, group)
    smp.barrier(group)
    results["heard"][kind] = [heard, others == members, len(members)]
smp.dp_barrier()
smp.mp_barrier()
smp.barrier()
""", 4, nothing, tmp_path)
    for ours in found:
        for kind in kinds:
            heard, in_order, size = ours["heard"][kind]
            assert heard == [True] * (size - 1) and in_order and size == (4 if kind == "world" or (kind in ("dp", "mp") and size == 4) else 2)


@pytest.mark.parametrize("other, words", [
    ("pass", "smp.broadcast"),  # goes on to something else
    ("smp.broadcast(1, smp.WORLD)", "smp.recv_from"),  # as torch.distributed would have it
    ("sys.exit(0)", "smp.broadcast"),
])
def test_a_broadcast_that_nobody_receives_is_an_error_in_time(nothing, tmp_path, other, words):
    ranks = Ranks(f"""
smp.init({{"pipeline_parallel_degree": 2, "peer_timeout": 5}})
begin = time.monotonic()
if RANK == 1:
    {other}
    time.sleep(12)
    os._exit(0)
results["error"] = refusal(smp.broadcast, len("loader"), smp.PP_GROUP)
results["seconds"] = time.monotonic() - begin
finish()
os._exit(0)
""", 2, nothing, tmp_path)
    out = ranks.processes[0].communicate(timeout=60)[0]
    ranks.processes[1].kill()
    ranks.wait()
    assert (tmp_path / "results_0.json").exists(), out
    found = json.loads((tmp_path / "results_0.json").read_text())
    kind, text = found["error"]
    assert kind == "peer" and words in text and "rank 1" in text and "\n" not in text, text
    assert found["seconds"] < 12
