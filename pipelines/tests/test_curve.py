import json

import matplotlib.pyplot as plt

from pipelines import curve

VALIDATION = {"hr@10": 0.3, "ndcg@10": 0.2}
ENTRIES = [*({"step": n, "loss": 9 - n / 9} for n in range(1, 40)), {"step": 39, "validation": VALIDATION}]


def test_the_legend_hides_nothing_that_is_drawn(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(plt, "close", kept.append)
    curve.draw(ENTRIES, "a run", tmp_path / "curve.png")
    (figure,) = kept
    legend = figure.legends[0].get_window_extent()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["training loss", "hr@10", "ndcg@10"]
    assert len(figure.axes) == 2 and not any(legend.overlaps(axis.get_tightbbox()) for axis in figure.axes)
    assert not legend.overlaps(figure.axes[0].xaxis.label.get_window_extent())


def test_a_run_becomes_a_picture_or_one_line_that_says_why_not(tmp_path, capsys):
    assert curve.main([str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"{tmp_path}: no metrics here: No such file or directory\n"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES) + '{"step": 4')
    assert curve.main([str(tmp_path)]) == 1
    assert "metrics.jsonl: a line is no JSON: " in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in ENTRIES))
    assert curve.main([str(tmp_path)]) == 0
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
