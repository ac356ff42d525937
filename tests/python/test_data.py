"""Text to sequences, and their order."""
import json
import random

import numpy
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from shardsmith.errors import Error
from shardsmith.finetune import data


@pytest.fixture
def folder(tmp_path):
    words = {word: number for number, word in enumerate(["[UNK]", "a", "b", "c", "[END]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


CONFIG = {"eos_token_id": 4, "vocab_size": 5}


def tokens(folder, paths, field="text", config=CONFIG):
    return data.tokenize(str(folder), [str(path) for path in paths], field, config).tolist()


def test_documents_end_with_the_end_token(folder):
    (folder / "x.txt").write_text("a b c")
    (folder / "y.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert tokens(folder, [folder / "x.txt", folder / "y.jsonl"]) == [1, 2, 3, 4, 1, 4, 2, 4]


def test_no_end_token_none_between(folder):
    (folder / "x.txt").write_text("a b")
    assert tokens(folder, [folder / "x.txt"], config={}) == [1, 2]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 0]}))
    assert tokens(folder, [folder / "x.txt"], config={}) == [1, 2, 4]


@pytest.mark.parametrize("content, part", [
    (b"\xff\xfe\xfa", "not UTF-8"), (b"  \n ", "holds no text"),
])
def test_bad_text(folder, content, part):
    path = folder / "x.txt"
    path.write_bytes(content)
    with pytest.raises(Error, match=part) as caught:
        tokens(folder, [path])
    assert caught.value.exit_code == 2 and str(path) in str(caught.value)


@pytest.mark.parametrize("line, part", [("{", ":1: no JSON"), ('{"body": "a"}', "no text field 'text' .found: body"),
                                        ("[1]", "no text field"), ('{"text": 3}', "no text field")])
def test_bad_lines(folder, line, part):
    path = folder / "x.jsonl"
    path.write_text(line)
    with pytest.raises(Error, match=part):
        tokens(folder, [path])


def test_missing_empty_and_folders_are_told_early(tmp_path):
    (tmp_path / "empty.txt").touch()
    for path in ("missing.txt", "empty.txt", "."):
        with pytest.raises(Error) as caught:
            data.check_files([str(tmp_path / path)])
        assert caught.value.exit_code == 2


def test_a_foreign_tokenizer_is_noticed(folder):
    (folder / "x.txt").write_text("a b c")
    with pytest.raises(Error, match="gives token 3, the model knows 3 tokens"):
        tokens(folder, [folder / "x.txt"], config={"vocab_size": 3})


def test_packing_splits_off_the_last_part():
    packed = data.pack(numpy.arange(103, dtype=numpy.int32), 5, 0.1, None, ["x"])
    assert packed.tokens.shape == (20, 5) and (packed.training, packed.evaluation) == (18, 2)
    assert packed.tokens[18, 0] == 90
    assert data.pack(numpy.arange(103, dtype=numpy.int32), 5, 0.5, 3, ["x"]).evaluation == 3
    assert data.pack(numpy.arange(10, dtype=numpy.int32), 5, 0.0, None, ["x"]).evaluation == 1


def test_too_short_text_is_an_error():
    with pytest.raises(Error, match="9 tokens are too few") as caught:
        data.pack(numpy.arange(9, dtype=numpy.int32), 5, 0.05, None, ["x"])
    assert caught.value.exit_code == 2


def test_each_epoch_takes_each_sample_once_in_its_own_order():
    order = data.Order(7, seed=3)
    first, second = order.take(0, 7), order.take(7, 7)
    assert sorted(first) == sorted(second) == list(range(7)) and first != second
    assert data.Order(7, seed=3).take(5, 4) == (first + second)[5:9]
    assert data.Order(7, seed=4).take(0, 7) != first


@pytest.mark.parametrize("seed", range(10))
def test_layouts_that_follow_each_other_take_each_sample_once_an_epoch(seed):
    """Whatever number of replicas goes on, in whatever batches: their samples follow on each other in the one order."""
    choose = random.Random(seed)
    order, consumed, taken = data.Order(choose.randint(5, 60), seed), 0, []
    while consumed < 4 * order.count:
        replicas, accumulation, batch = (choose.choice((1, 2, 3, 4)) for _ in range(3))
        for _ in range(choose.randint(1, 4)):  # updates before the next layout
            for part in range(accumulation):
                for replica in range(replicas):
                    taken += order.take(data.batch_positions(consumed, part, replica, replicas, batch), batch)
            consumed += replicas * accumulation * batch
    for epoch in range(4):
        assert sorted(taken[epoch * order.count:(epoch + 1) * order.count]) == list(range(order.count))


@pytest.mark.parametrize("replicas, accumulation, batch", [(1, 4, 2), (2, 2, 2), (4, 1, 2), (2, 4, 1)])
def test_an_update_takes_the_same_samples_in_every_layout(replicas, accumulation, batch):
    taken = []
    for part in range(accumulation):
        for replica in range(replicas):
            begin = data.batch_positions(16, part, replica, replicas, batch)
            taken += range(begin, begin + batch)
    assert sorted(taken) == list(range(16, 24))
