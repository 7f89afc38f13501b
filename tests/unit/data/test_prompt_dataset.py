"""Files to prompts: parquet and JSON lines, the chat template, and every way in which a file can be wrong."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.prompt_files import WORDS, row, word_tokenizer, write_jsonl, write_parquet
from verl.data.dataset import PromptDataset
from verl.data.rows import RowError


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(word) for word in text.split())


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [row("a b"), row("c", extra_info={"length": 1, "more": "x"})]
    lines = PromptDataset([write_jsonl(tmp_path / "x.jsonl", rows)], word_tokenizer())
    table = PromptDataset([write_parquet(tmp_path / "x.parquet", rows)], word_tokenizer())
    assert [len(lines), len(table)] == [2, 2]
    for position in range(2):
        line, entry = lines.prompt(position), table.prompt(position)
        assert (line.ids, line.index, line.data_source) == (entry.ids, entry.index, entry.data_source)
        assert line.ground_truth == entry.ground_truth == ["A B", "C"][position]
        assert line.extra_info.items() <= entry.extra_info.items()  # parquet adds the absent fields as None


def test_chat_messages_go_through_the_template(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "a"}, {"role": "user", "content": "b c"}]
    dataset = PromptDataset([write_jsonl(tmp_path / "x.jsonl", [row("", prompt=prompt)])], word_tokenizer())
    # written out by hand from the template, the opening of the answer last
    assert dataset.prompt(0).ids == ids("<|start|> system a <|end|> <|start|> user b c <|end|> <|start|> assistant")


def test_a_string_is_fed_as_it_is(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "x.jsonl", [row("", prompt="a b <|end|>")])
    for tokenizer in (word_tokenizer(), word_tokenizer(chat_template=None)):
        assert PromptDataset([file], tokenizer).prompt(0).ids == ids("a b <|end|>")


def test_rows_are_numbered_over_all_files(tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / "a.jsonl", [row("a"), row("b")]),
        write_parquet(tmp_path / "b.parquet", [row("c")]),
        write_jsonl(tmp_path / "c.jsonl", [row("d"), row("e")]),
    ]
    dataset = PromptDataset(files, word_tokenizer())
    assert [(dataset.prompt(i).index, dataset.prompt(i).ground_truth) for i in range(5)] == list(enumerate("ABCDE"))
    dataset.keep([1, 2, 4])
    assert [(dataset.prompt(i).index, dataset.prompt(i).ground_truth) for i in range(len(dataset))] == [
        (1, "B"),
        (2, "C"),
        (4, "E"),
    ]
    assert dataset.place(2) == f"{tmp_path}/c.jsonl, row 1 (line 2)"


def test_rows_to_keep_that_are_not_there(tmp_path: Path) -> None:
    dataset = PromptDataset([write_jsonl(tmp_path / "a.jsonl", [row("a")])], word_tokenizer())
    with pytest.raises(ValueError, match="has 1 rows here, but row 3 is asked for: do all nodes see the same files"):
        dataset.keep([0, 3])


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    write_jsonl(file, ["", row("a"), "   ", row("b")])
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().lstrip(b"\n").replace(b"\n", b"\r\n"))
    dataset = PromptDataset([str(file)], word_tokenizer())
    assert [dataset.prompt(i).ground_truth for i in range(len(dataset))] == ["A", "B"]
    assert dataset.place(1).endswith("row 1 (line 3)")


def test_messages_need_a_chat_template(tmp_path: Path) -> None:
    dataset = PromptDataset([write_jsonl(tmp_path / "x.jsonl", [row("a")])], word_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match=r"no chat template.*model\.tokenizer_path") as error:
        dataset.prompt(0)
    assert not isinstance(error.value, RowError)  # no row is at fault, so none may be dropped for it


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "not valid JSON"),
        ('["a"]', "a JSON list, not an object"),
        ("7", "a JSON int"),
        ('{"prompt": "a"}', "no 'data_source'"),
        ("[" * 100_000, "not valid JSON"),
        ('{"n": ' + "9" * 10_000 + "}", "not valid JSON"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    dataset = PromptDataset([write_jsonl(tmp_path / "x.jsonl", [row("a"), "", line])], word_tokenizer())
    assert dataset.prompt(0).ground_truth == "A"
    with pytest.raises(RowError, match=rf"x\.jsonl, row 1 \(line 3\): {said}"):
        dataset.prompt(1)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(RowError, match=r"row 0 \(line 1\): not valid JSON"):
        PromptDataset([str(tmp_path / "x.jsonl")], word_tokenizer()).prompt(0)


def test_messages_that_the_template_refuses_are_named(tmp_path: Path) -> None:
    rows = [row("a"), row("", prompt=[{"role": "tool", "content": "a"}])]
    dataset = PromptDataset([write_parquet(tmp_path / "x.parquet", rows)], word_tokenizer())
    with pytest.raises(RowError, match=r"x\.parquet, row 1: the tokenizer's chat template refuses .*no tools here"):
        dataset.prompt(1)


def test_every_unusable_file_is_named_at_once(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "good.jsonl", [row("a")])
    (tmp_path / "torn.parquet").write_bytes(Path(write_parquet(tmp_path / "x.parquet", [row("a")])).read_bytes()[:-9])
    (tmp_path / "text.parquet").write_text("not parquet")
    (tmp_path / "blank.jsonl").write_text("\n\n")
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "x.csv").write_text("prompt\n")
    few = write_parquet(tmp_path / "few.parquet", [{"prompt": "a", "answer": "b"}])
    none = str(tmp_path / "none.parquet")
    pq.write_table(pa.Table.from_pylist([row("a")]).slice(0, 0), tmp_path / "empty.parquet")
    names = ["torn.parquet", "text.parquet", "blank.jsonl", "folder.jsonl", "x.csv", "empty.parquet"]
    with pytest.raises(ValueError) as error:
        PromptDataset([good, *(str(tmp_path / name) for name in names), few, none], word_tokenizer())
    said = str(error.value)
    assert said.startswith("data.train_files cannot be used:")
    for text in (
        "torn.parquet: cannot be read as parquet",
        "text.parquet: cannot be read as parquet",
        "blank.jsonl: the file has no rows",
        "folder.jsonl: not a file",
        "x.csv: the name ends in '.csv'; give .parquet or .jsonl",
        "empty.parquet: the file has no rows",
        "few.parquet: no column 'data_source', 'reward_model'; the file has prompt, answer",
        "none.parquet: no such file",
    ):
        assert text in said
    assert "good.jsonl" not in said


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.val_files is empty"):
        PromptDataset([], word_tokenizer(), setting="data.val_files")


def test_a_folder_named_like_a_partition_adds_no_column(tmp_path: Path) -> None:
    folder = tmp_path / "data_source=other"
    folder.mkdir()
    file = write_parquet(folder / "x.parquet", [row("a")])
    assert PromptDataset([file], word_tokenizer()).prompt(0).data_source == "unit"
