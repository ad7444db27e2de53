"""``python -m benchmarks.selftuning``: its studies run, nothing is repeated; the size of a figure is never checked."""

import json

import pytest

from benchmarks.common.runs import Trainer
from benchmarks.selftuning import __main__ as selftuning


def smoke(folder, study):
    """Two steps of every run of a study."""
    assert selftuning.main(["--smoke", "--study", study, "--seeds", "0", "--out", str(folder)]) == 0
    return json.loads((folder / f"{study}.json").read_text())


@pytest.mark.fast("pictures")
@pytest.mark.parametrize("study", ["pictures", "whole", "digits-64"])
def test_a_study_writes_table_json_and_plot(study, tmp_path, capsys):
    result = smoke(tmp_path, study)
    assert (tmp_path / f"{study}.png").stat().st_size > 0
    assert {"versions", "commit", "machine", "seeds", "chosen", "skipped", "command"} <= result.keys()
    assert result["command"].endswith(f"benchmarks.selftuning --smoke --study {study} --seeds 0")  # no folder
    printed = capsys.readouterr().out
    assert all(line in printed for line in result["table"])
    labels = [run["of"] for run in result["runs"]]
    assert labels.count("KFAC") == 1 and labels.count("AdamW") == (1 if study == "digits-64" else 5)


def test_started_again_nothing_is_repeated(tmp_path, monkeypatch):
    first = smoke(tmp_path, "pictures")
    monkeypatch.setattr(Trainer, "train_step", lambda self: pytest.fail("a run was repeated"))
    assert smoke(tmp_path, "pictures")["runs"] == first["runs"]
