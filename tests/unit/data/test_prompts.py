import gzip
import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from megarl.data import prepare, sources
from megarl.data.arithmetic import generate
from megarl.data.prompts import DatasetConfig, get_gsm8k_rl_dataset, load_gsm8k, prompt_ids, split_dataset_by_node
from megarl.knobs import UserError

ROWS = [{"question": f"What is {i}+1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}"} for i in range(10)]
HUB_FILE = "train-00000-of-00001.parquet"


def rows_of(dataset: Dataset) -> list[dict[str, Any]]:
    return [{"question": r["question"], "answer": r["answer"]} for r in dataset]


def write(file: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Writes rows with `datasets`, in the format of the file's suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    data = Dataset.from_list(rows)
    if file.suffix == ".parquet":
        data.to_parquet(file)
    elif file.suffix == ".gz":
        with gzip.open(file, "wt") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        data.to_json(file)
    return file


def test_the_bundled_name_gives_the_generated_split() -> None:
    assert rows_of(load_gsm8k("arithmetic", "test")) == generate("test")
    assert rows_of(load_gsm8k("arithmetic", "train[:3]")) == generate("train")[:3]


@pytest.mark.parametrize(
    "file",
    [
        f"main/{HUB_FILE}",
        "main/train.jsonl",
        "train.json",
        "train.jsonl.gz",
        "train.parquet",
        "data/train-0-of-1.parquet",
    ],
)
def test_a_local_folder_is_read_in_the_hub_layout_and_in_plain_layouts(tmp_path: Path, file: str) -> None:
    write(tmp_path / file)
    (tmp_path / "README.md").write_text("a data set\n")
    assert rows_of(load_gsm8k(str(tmp_path), "train")) == ROWS


def test_all_shards_of_the_split_are_read_in_order_and_no_other_split(tmp_path: Path) -> None:
    write(tmp_path / "main" / "train-00000-of-00002.parquet", ROWS[:4])
    write(tmp_path / "main" / "train-00001-of-00002.parquet", ROWS[4:])
    write(tmp_path / "main" / "test-00000-of-00001.parquet", ROWS[:2])
    write(tmp_path / "main" / "training_notes.jsonl", ROWS[:1])
    assert rows_of(load_gsm8k(str(tmp_path), "train")) == ROWS
    assert rows_of(load_gsm8k(str(tmp_path), "test")) == ROWS[:2]


def test_the_name_picks_the_subfolder(tmp_path: Path) -> None:
    write(tmp_path / "main" / HUB_FILE, ROWS[:4])
    write(tmp_path / "socratic" / HUB_FILE, ROWS[4:])
    assert rows_of(load_gsm8k(str(tmp_path), "train", "socratic")) == ROWS[4:]


def test_a_single_file_counts_as_the_requested_split(tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl")
    assert rows_of(load_gsm8k(str(file), "test[2:4]")) == ROWS[2:4]


def error_of(path: Path | str, split: str = "train") -> str:
    with pytest.raises(UserError) as caught:
        load_gsm8k(str(path), split)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_without_the_split_says_what_it_holds(tmp_path: Path) -> None:
    write(tmp_path / "main" / HUB_FILE)
    message = error_of(tmp_path, "validation")
    assert "'validation'" in message
    assert HUB_FILE in message
    (tmp_path / "empty").mkdir()
    assert "nothing" in error_of(tmp_path / "empty")


@pytest.mark.parametrize("path", ["/no/such/folder", "./nowhere", "arithmetics", "a/b/c"])
def test_a_path_that_is_neither_local_nor_a_hub_name_is_not_found(path: str) -> None:
    assert f"{path!r} not found" in error_of(path)


def test_missing_columns_are_named_with_the_existing_ones(tmp_path: Path) -> None:
    message = error_of(write(tmp_path / "a.jsonl", [{"prompt": "p", "answer": "#### 1"}]))
    assert "no column question" in message
    assert "['prompt', 'answer']" in message
    message = error_of(write(tmp_path / "b.jsonl", [{"prompt": "p"}]))
    assert "no column question and no answer" in message


@pytest.mark.parametrize("answer", [4, {"value": "4"}, ["4"]])
def test_a_column_that_is_not_text_is_refused(tmp_path: Path, answer: Any) -> None:
    assert "text is needed" in error_of(write(tmp_path / "a.parquet", [{"question": "q", "answer": answer}]))


def test_null_values_are_counted(tmp_path: Path) -> None:
    rows = [*ROWS, {"question": None, "answer": "#### 1"}]
    assert "column question of" in (message := error_of(write(tmp_path / "a.jsonl", rows)))
    assert "1 rows" in message


def test_empty_data_is_refused(tmp_path: Path) -> None:
    Dataset.from_list(ROWS).select([]).to_parquet(tmp_path / "a.parquet")
    assert "empty" in error_of(tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("")
    assert "empty" in error_of(tmp_path / "b.jsonl")


def test_a_broken_file_a_mixed_split_and_a_strange_type_are_one_line_each(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"question": "q", "answ')
    assert "cannot be read" in error_of(tmp_path / "broken.jsonl")
    (tmp_path / "broken.parquet").write_text("no parquet")
    assert "cannot be read" in error_of(tmp_path / "broken.parquet")
    write(tmp_path / "mixed" / "train-0.parquet")
    write(tmp_path / "mixed" / "train-1.jsonl")
    assert "must all be" in error_of(tmp_path / "mixed")
    (tmp_path / "rows.txt").write_text("q")
    assert "must all be" in error_of(tmp_path / "rows.txt")
    assert "cannot be read" in error_of(write(tmp_path / "fine.jsonl"), "train[:oops]")


def test_rl_rows_hold_messages_and_answer_and_keep_other_columns(tmp_path: Path, tokenizer: Any) -> None:
    file = write(tmp_path / "a.jsonl", [{**row, "level": i} for i, row in enumerate(ROWS)])
    dataset = get_gsm8k_rl_dataset(str(file), "train", tokenizer)
    assert dataset[3] == {
        "messages": [{"role": "user", "content": "What is 3+1?"}],
        "answer": "3+1=4\n#### 4",
        "level": 3,
    }


def test_the_instruction_ends_every_prompt(tmp_path: Path, tokenizer: Any) -> None:
    dataset = get_gsm8k_rl_dataset(str(write(tmp_path / "a.jsonl")), "train", tokenizer, instruction="\nUse \\boxed{}.")
    assert dataset[0]["messages"][0]["content"] == "What is 0+1?\nUse \\boxed{}."


def test_prompts_over_the_limit_are_dropped_counted_and_listed(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[2]["question"] += " and 1" * 20
    rows[7]["question"] += " and 1" * 30
    lengths = [len(prompt_ids(tokenizer, [{"role": "user", "content": row["question"]}])) for row in rows]
    file = str(write(tmp_path / "a.jsonl", rows))
    with caplog.at_level(logging.WARNING, logger="megarl"):
        dataset = get_gsm8k_rl_dataset(file, "train", tokenizer, max_length=lengths[2] - 1)
    assert list(dataset["answer"]) == [row["answer"] for i, row in enumerate(ROWS) if i not in (2, 7)]
    assert f"2 of 10 prompts over max_length {lengths[2] - 1} were skipped" in caplog.text
    assert f"row 2 ({lengths[2]} tokens), row 7 ({lengths[7]} tokens)" in caplog.text
    assert len(get_gsm8k_rl_dataset(file, "train", tokenizer, max_length=max(lengths))) == 10
    with pytest.raises(UserError, match=f"all 10 prompts are over max_length 3 .*{min(lengths)} tokens"):
        get_gsm8k_rl_dataset(file, "train", tokenizer, max_length=3)


def test_a_reference_without_its_number_is_refused_for_rl(tmp_path: Path, tokenizer: Any) -> None:
    rows = [*ROWS[:4], {"question": "q", "answer": "about four"}]
    with pytest.raises(UserError, match=r"1 of 5 answers.*row 4.*about four"):
        get_gsm8k_rl_dataset(str(write(tmp_path / "a.jsonl", rows)), "train", tokenizer)


def test_columns_that_clash_with_reward_arguments_are_left_out_with_a_warning(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "a.jsonl", [{**row, "prompt": "p"} for row in ROWS])
    with caplog.at_level(logging.WARNING, logger="megarl"):
        assert "prompt" not in get_gsm8k_rl_dataset(str(file), "train", tokenizer).column_names
    assert "['prompt']" in caplog.text


def test_a_tokenizer_without_a_chat_template_sends_the_question_itself(tokenizer: Any) -> None:
    class Plain:
        chat_template = None
        encode = staticmethod(tokenizer.encode)

    assert prompt_ids(Plain(), [{"role": "user", "content": "1+1?"}]) == tokenizer.encode("1+1?")


def test_ranks_share_the_rows_without_overlap(tmp_path: Path) -> None:
    dataset = load_gsm8k(str(write(tmp_path / "a.jsonl")), "train")
    parts = [split_dataset_by_node(dataset, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(q for part in parts for q in part["question"]) == sorted(row["question"] for row in ROWS)


def test_tiny_data_shows_no_progress_bar_and_the_setting_is_restored(
    tmp_path: Path, tokenizer: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = str(write(tmp_path / "a.jsonl"))
    capfd.readouterr()
    get_gsm8k_rl_dataset(file, "train", tokenizer, max_length=100)
    assert capfd.readouterr().err == ""
    assert not datasets.are_progress_bars_disabled()
    monkeypatch.setattr(prepare, "BAR_FROM_ROWS", 5)
    get_gsm8k_rl_dataset(file, "train", tokenizer, max_length=100, instruction="!")
    assert "preparing data" in (stderr := capfd.readouterr().err)
    assert "measuring prompts" in stderr


def test_the_defaults_are_the_bundled_train_split() -> None:
    config = DatasetConfig()
    assert (config.path, config.split, config.name) == ("arithmetic", "train", "main")


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Starts a hub that accepts the connection and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", endpoint)
        monkeypatch.setattr(sources, "HUB_TIMEOUT_S", 0.5)
        yield endpoint


def test_a_hub_that_does_not_answer_is_named_within_the_deadline(silent_hub: str) -> None:
    start = time.monotonic()
    message = error_of("openai/gsm8k")
    assert time.monotonic() - start < 300
    assert silent_hub in message
    assert "openai/gsm8k" in message
    assert "local folder" in message
    assert not datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_refuses_the_connection_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{port}")
    start = time.monotonic()
    assert "refused" in error_of("openai/gsm8k")
    assert time.monotonic() - start < 300


def test_offline_mode_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in error_of("openai/gsm8k")


class NotThere(http.server.BaseHTTPRequestHandler):
    """Answers like the hub for a data set that does not exist."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None:
        return


def test_a_data_set_missing_on_the_hub_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "HUB_TIMEOUT_S", 300.0)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotThere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        try:
            assert "doesn't exist on the Hub" in error_of("openai/gsm9k")
        finally:
            server.shutdown()
            thread.join(timeout=300)


def test_a_local_folder_takes_precedence_over_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_hub: str
) -> None:
    write(tmp_path / "openai" / "gsm8k" / "main" / HUB_FILE)
    monkeypatch.chdir(tmp_path)
    assert rows_of(load_gsm8k("openai/gsm8k", "train")) == ROWS


def test_without_the_hub_the_cached_copy_is_used_with_a_warning(
    tmp_path: Path, caches: Path, silent_hub: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "gsm8k" / "main" / HUB_FILE)
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n---\n"
    (tmp_path / "gsm8k" / "README.md").write_text(card)
    datasets.load_dataset(str(tmp_path / "gsm8k"), "main")
    (caches / "datasets" / "gsm8k").rename(caches / "datasets" / "openai___gsm8k")
    with caplog.at_level(logging.WARNING, logger="megarl"):
        assert rows_of(load_gsm8k("openai/gsm8k", "train")) == ROWS
    assert "the hub cannot be reached (timed out); the cached copy is used" in caplog.text
    assert "socratic" in error_of_name("socratic")
    assert "validation" in error_of("openai/gsm8k", "validation")


def error_of_name(name: str) -> str:
    with pytest.raises(UserError) as caught:
        load_gsm8k("openai/gsm8k", "train", name)
    return str(caught.value)
