"""A report that is saved as HTML opens in a browser from its file alone."""

from __future__ import annotations

from pathlib import Path

from gpumagic.dryrun.report import DryRunPoint, DryRunReport, DryRunRow


def test_a_saved_report_opens_without_other_files_and_unfolds(browser, tmp_path: Path) -> None:
    parts = {"parameters": 512, "activations": 512}
    report = DryRunReport(
        "cuda:0", {"cuda:0": 1024}, {}, 1, "y = model(x)", None, parts, True, 4096,
        modules={f"model.blocks.{number}.<b>attn</b>": {"parameters": 64} for number in range(40)},
        timeline=tuple(DryRunPoint("cuda:0", step, 1, 1024, parts) for step in range(5)),
        lines=(DryRunRow("cuda:0", 1, "y = model(x)", 1024, 1024),),
    )  # fmt: skip
    page, asked, failed = browser.new_page(), [], []
    page.set_default_timeout(5_000)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: failed.append(error))  # noqa: PLW0108  # it sets attributes of what it is given
    address = report.save(tmp_path / "report.html").as_uri()
    page.goto(address)
    assert (asked, failed) == ([address], [])
    assert page.title() == report.verdict
    page.get_by_text("By module").click()
    page.get_by_text("All 40 modules").click()
    assert page.get_by_text("39.<b>attn</b>").last.is_visible()
    page.close()
