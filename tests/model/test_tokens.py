"""Prompts and token ids: what is read, how it is padded and cut, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerproof.errors import UserError
from layerproof.model import tiny
from layerproof.model.inputs import read_prompts, read_token_ids
from layerproof.model.tokens import Tokens, make, pad

TEXT = "The golden key lay on the table.\nAlice looked at it.\n\nIt was very small, and the door was smaller still."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder with a tokenizer, in the layout of the default checkpoint."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny.build_tokenizer(TEXT).save(str(directory / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", **tiny.SPECIAL_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    (directory / "config.json").write_text(json.dumps(tiny.CONFIG))
    return directory


def made(tmp_path, checkpoint, prompts=None, token_ids=None, config=tiny.CONFIG, max_tokens=512):
    source = tmp_path / "input"
    source.write_text(prompts if prompts is not None else json.dumps(token_ids), encoding="utf-8")
    texts, ids = (source, None) if prompts is not None else (None, source)
    make(tmp_path / "tokens.json", checkpoint, config, texts, ids, max_tokens, trust_remote_code=False)
    return Tokens.read(tmp_path / "tokens.json")


@given(st.lists(st.lists(st.integers(0, 511), min_size=1, max_size=9), min_size=1, max_size=5), st.integers(0, 511))
def test_padding_is_on_the_right_and_outside_the_mask(rows, pad_id):
    tokens = pad(rows, pad_id)
    assert tokens.ids.dtype == np.int64 and tokens.valid.dtype == np.bool_
    assert tokens.ids.shape == tokens.valid.shape == (len(rows), max(map(len, rows)))
    for row, ids, valid in zip(rows, tokens.ids, tokens.valid, strict=True):
        assert ids.tolist() == row + [pad_id] * (len(ids) - len(row))
        assert valid.tolist() == [True] * len(row) + [False] * (len(ids) - len(row))


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        ("one", ["one"]),
        ("one\ntwo\n", ["one\ntwo"]),
        ("one\n\ntwo", ["one", "two"]),
        ("\n\n one\n\n\n\n\ntwo \n\n", [" one", "two "]),
        ("one\r\nmore\r\n\r\ntwo\r\n", ["one\nmore", "two"]),
        ("Grüße\n\n你好", ["Grüße", "你好"]),
        ("one\n\n  \n\ntwo", ["one", "two"]),
        ("\ufeffone\n\t\ntwo\n \t \n", ["one", "two"]),
    ],
)
def test_empty_lines_separate_prompts(tmp_path, text, prompts):
    (tmp_path / "p.txt").write_bytes(text.encode())
    assert read_prompts(tmp_path / "p.txt") == prompts


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "contains no prompt"),
        (b"\n \r\n\n\t\n", "contains no prompt"),
        (b"caf\xe9", "UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_unusable_prompts_are_refused_in_one_line(tmp_path, data, told):
    if data is not None:
        (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(UserError, match=told) as error:
        read_prompts(tmp_path / "p.txt")
    assert str(error.value).startswith(f"{tmp_path / 'p.txt'}: ") and "\n" not in str(error.value)


def test_token_ids_are_read_up_to_the_ends_of_the_vocabulary(tmp_path):
    (tmp_path / "ids.json").write_text("[[0, 96], [5]]")
    assert read_token_ids(tmp_path / "ids.json", 97) == [[0, 96], [5]]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[1, 2", "cannot be read as JSON"),
        ("\xe9", "cannot be read as JSON"),
        ("{}", "not a list of lists"),
        ("[]", "not a list of lists"),
        ("[1, 2]", "not a list of lists"),
        ("[[1], []]", "row 1 is empty"),
        ("[[1], [3, 97]]", "row 1 contains 97. Write integers from 0 to 96"),
        ("[[-1]]", "row 0 contains -1"),
        ("[[1.0]]", "row 0 contains 1.0"),
        ("[[true]]", "row 0 contains True"),
        ('[["1"]]', "row 0 contains '1'"),
        ("[[null]]", "row 0 contains None"),
        ("[[[1]]]", r"row 0 contains \[1\]"),
    ],
)
def test_unusable_token_ids_are_refused_in_one_line(tmp_path, text, told):
    (tmp_path / "ids.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=told) as error:
        read_token_ids(tmp_path / "ids.json", 97)
    assert str(error.value).startswith(f"{tmp_path / 'ids.json'}: ") and "\n" not in str(error.value)


def test_prompts_go_through_the_tokenizer(tmp_path, checkpoint):
    tokens = made(tmp_path, checkpoint, prompts=TEXT)
    expected = [tiny.build_tokenizer(TEXT).encode(part).ids for part in TEXT.split("\n\n")]
    assert [row[valid].tolist() for row, valid in zip(tokens.ids, tokens.valid, strict=True)] == expected


def test_padding_is_the_tokenizers(tmp_path, checkpoint):
    tokens = made(tmp_path, checkpoint, prompts="a\n\na longer prompt", config=tiny.CONFIG | {"pad_token_id": 7})
    assert not tokens.valid.all()
    assert set(tokens.ids[~tokens.valid]) == {tiny.PAD}


@pytest.mark.parametrize(("stated", "used"), [(7, 7), (None, 0), (-1, 0)])
def test_padding_of_token_ids_is_the_models(tmp_path, checkpoint, stated, used):
    tokens = made(tmp_path, checkpoint, token_ids=[[1, 2], [3]], config=tiny.CONFIG | {"pad_token_id": stated})
    assert tokens.ids.tolist() == [[1, 2], [3, used]]


def test_both_inputs_are_cut_to_max_tokens(tmp_path, checkpoint, capsys):
    whole = made(tmp_path, checkpoint, prompts=TEXT)
    cut = made(tmp_path, checkpoint, prompts=TEXT, max_tokens=3)
    assert cut.ids.tolist() == whole.ids[:, :3].tolist()
    assert made(tmp_path, checkpoint, token_ids=[[1, 2, 3, 4], [5]], max_tokens=3).ids.tolist() == [
        [1, 2, 3],
        [5, 0, 0],
    ]
    assert "prompt 1: 4 tokens, cut to 3 (inputs.max_tokens)\n" in capsys.readouterr().out


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "ids.json").write_text("[[1]]", encoding="utf-8-sig")
    assert read_token_ids(tmp_path / "ids.json", 97) == [[1]]


def test_the_vocabulary_is_that_of_the_text_model(tmp_path, checkpoint):
    config = {"vocab_size": 9, "text_config": {"vocab_size": 4}}
    assert made(tmp_path, checkpoint, token_ids=[[3]], config=config).ids.tolist() == [[3]]
    with pytest.raises(UserError, match="from 0 to 3"):
        made(tmp_path, checkpoint, token_ids=[[4]], config=config)


def test_a_checkpoint_without_tokenizer_is_refused_in_one_line(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(tiny.CONFIG))
    with pytest.raises(UserError, match=r"has no usable tokenizer .* Set inputs\.token_ids instead") as error:
        made(tmp_path, tmp_path / "model", prompts="one")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "tokens.json").exists()


def test_token_ids_need_no_tokenizer(tmp_path):
    assert made(tmp_path, tmp_path, token_ids=[[1, 511]]).ids.tolist() == [[1, 511]]
