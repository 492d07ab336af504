"""What a report may not say: fragmentation that is none, an untried remedy above a tried one, a fit that never ran."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

import gpumagic
from gpumagic import simgpu
from gpumagic.advice import number_choice
from gpumagic.advice import search as advising
from gpumagic.advice.facts import Collection, Facts, TensorFact
from gpumagic.advice.records import Advice, EditTrial, Need
from gpumagic.advice.rules import batch, collected, kept, limits, parts
from gpumagic.advice.rules.verdict import explain
from gpumagic.dryrun import run
from gpumagic.memory.allocator import AllocatorStats
from gpumagic.report.text import render
from gpumagic.source import cell_code, text
from tests.oom.made_facts import changed, made_facts
from tests.oom.oom_cells import forget_everything

MIB, GIB = 2**20, 2**30
pytestmark = pytest.mark.usefixtures("few_objects", "warm_worker")
PIECES = made_facts(
    kind="cuda allocator", device="cuda:0", requested=4 * GIB, capacity=15 * GIB, free=GIB, unallocated=5 * GIB,
    before=AllocatorStats(0, 0, 0), at_failure=AllocatorStats(9 * GIB, 14 * GIB, 9 * GIB),
    after=AllocatorStats(0, 0, 0), from_allocator=True, segments_can_expand=True,
)  # fmt: skip


def of_cell(facts: Facts, code: str, line: int, **more: object) -> Facts:
    return changed(
        facts,
        cell=cell_code.read_cell(code),
        line=line,
        failing_text=text.parse(code, line=line),
        **more,
    )


def test_a_cell_larger_than_the_card_is_not_fragmented() -> None:
    assert explain(PIECES).cause == "fragmentation"
    needs_more = changed(PIECES, need=Need(16 * GIB, 15 * GIB, fits=False, certain=True))
    assert explain(needs_more).cause == "shortage"
    assert not list(limits.expandable_segments(needs_more))
    assert (
        explain(changed(PIECES, need=Need(14 * GIB, 15 * GIB, fits=False, certain=True))).cause
        == "fragmentation"
    )


def test_a_leak_is_told_by_its_variable_and_is_no_fragmentation() -> None:
    code = "losses = []\nfor x in data:\n    loss = net(x).mean()\n    losses.append(loss)"
    leaking = of_cell(
        PIECES, code, 3, collections={"losses": Collection(8, 4096, graphs=8, is_of_numbers=True)},
        tensors={"loss": TensorFact((), "float32", 4, "cuda:0", has_graph=True)},
    )  # fmt: skip
    assert explain(leaking).cause == "shortage"
    needs = changed(leaking, need=Need(20 * GIB, 15 * GIB, fits=False, certain=True))
    assert explain(needs).sentence.endswith(
        "A leak: losses holds 8 tensors with a graph, one more in every pass."
    )


def test_what_fits_an_empty_card_is_told_apart_from_what_fits_none() -> None:
    need = Need(16 * GIB, 15 * GIB, fits=False, certain=True, needed_alone=9 * GIB)
    assert explain(changed(PIECES, need=need)).sentence == (
        "Not enough memory beside what earlier cells hold: alone the cell needs 9.0 GiB of the 15.0 GiB of cuda:0, "
        "with them 16.0 GiB: 1.0 GiB missing."
    )


def test_a_need_that_hangs_on_a_value_is_told_with_its_line() -> None:
    need = Need(16 * GIB, 15 * GIB, fits=None, certain=False, depends_on="line 7")
    assert (
        "needs up to 16.0 GiB of cuda:0, depending on line 7"
        in explain(changed(PIECES, need=need)).sentence
    )


class Told:
    """Trials of which the outcome is given by title."""

    is_slow = False

    def __init__(self, outcomes):
        self._outcomes = outcomes

    def stop_if_slow(self) -> bool:
        return self.is_slow

    def of(self, *edits: Advice) -> EditTrial:
        return self._outcomes.get(edits[0].title, EditTrial())


def ranked(monkeypatch, *suggestions, **more) -> list[str]:
    """Return the order of suggestions, each with its tier, what came of it, and more fields."""
    tiers = [
        (
            lambda _, own=tier: (
                Advice(title, frees, None, first=f"run({title!r})")
                for title, at, _, frees in suggestions
                if at == own
            )
        )
        for tier in range(6)
    ]
    monkeypatch.setattr(advising, "TIERS", tuple((tier,) for tier in tiers))
    facts = changed(PIECES, need=Need(16 * GIB, 15 * GIB, fits=False, certain=True), **more)
    outcomes = {title: trial for title, _, trial, _ in suggestions if trial is not None}
    return [each.title for each in advising.advise(facts, Told(outcomes))]


FITS = EditTrial(True, True, 10 * GIB, 15 * GIB, 6 * GIB)
FAILS = EditTrial(False, True, 15 * GIB + 1, 15 * GIB, GIB)


def test_what_was_not_tried_never_stands_above_what_was(monkeypatch) -> None:
    found = ranked(
        monkeypatch, ("untried", 0, None, None), ("fails", 2, FAILS, None), ("8-bit", 4, None, None)
    )
    assert found == ["fails", "untried", "8-bit"]
    assert ranked(monkeypatch, ("untried", 0, None, None), ("fits", 3, FITS, None)) == ["fits"]


def test_where_a_dry_run_takes_long_the_first_that_fits_ends_the_tries(monkeypatch) -> None:
    two = (("fits", 1, FITS, None), ("dearer", 2, FAILS, None))
    assert ranked(monkeypatch, *two) == ["fits", "dearer"]
    monkeypatch.setattr(Told, "is_slow", True)
    assert ranked(monkeypatch, *two) == ["fits"]
    cheaper = (("fails", 0, FAILS, None), *two)
    assert ranked(monkeypatch, *cheaper) == ["fits", "fails"], (
        "what costs less is tried all the same"
    )


def test_crumbs_never_stand_above_a_leak(monkeypatch) -> None:
    assert (
        ranked(monkeypatch, ("6 MiB", 0, None, 6 * MIB), ("201 MiB", 1, None, 201 * MIB))[0]
        == "201 MiB"
    )
    assert (
        ranked(monkeypatch, ("150 MiB", 0, None, 150 * MIB), ("201 MiB", 1, None, 201 * MIB))[0]
        == "150 MiB"
    )


def test_what_only_divides_activations_is_not_tried_where_the_parameters_are_too_large() -> None:
    code = "for q in queries.split(500):\n    d = torch.cdist(q, base)"
    facts = of_cell(PIECES, code, 2)
    need = Need(40 * GIB, 15 * GIB, fits=False, certain=True)
    assert any(
        "at a time" in each.title for each in advising.advise(changed(facts, need=need), Untried())
    )
    fixed = replace(need, static=16 * GIB)
    assert not any(
        "at a time" in each.title for each in advising.advise(changed(facts, need=fixed), Untried())
    )


class Untried(Told):
    as_is = None

    def __init__(self):
        super().__init__({})

    def untried(self) -> EditTrial:
        return EditTrial()


@pytest.mark.parametrize(
    ("code", "line", "edit"),
    [
        ("for q in queries.split(500):\n    d = torch.cdist(q, base)", 2, "for q in queries.split(250):"),
        ("for q, k in zip(queries.split(500), keys.split(500)):\n    d = torch.cdist(q, k)", 2,
         "for q, k in zip(queries.split(250), keys.split(250)):"),
        ("for q in torch.split(queries, 500):\n    d = torch.cdist(q, base)", 2,
         "for q in torch.split(queries, 250):"),
        ("for i in range(0, len(x), 500):\n    y = x[i : i + 500] @ w", 2,
         "for i in range(0, len(x), 250):\n    y = x[i : i + 250] @ w"),
        ("for q in x.chunk(4):\n    y = q @ w", 2, "for q in x.chunk(8):"),
        ("step = 500\nfor i in range(0, len(x), step):\n    y = x[i : i + step] @ w", 3, "step = 250"),
        ("d = [torch.cdist(q, base) for q in queries.split(500)]", 1,
         "d = [torch.cdist(q, base) for q in queries.split(250)]"),
        ("loader = DataLoader(data, 64)\nfor x in loader:\n    net(x)", 3, "loader = DataLoader(data, 32)"),
    ],
)  # fmt: skip
def test_parts_are_made_smaller_where_the_code_says_how_large_they_are(code, line, edit) -> None:
    facts = of_cell(PIECES, code, line, numbers={"step": 500})
    (choice,) = parts.smaller_parts(facts)
    assert choice.make(choice.guess).edit == edit


@pytest.mark.parametrize(
    ("code", "line", "title"),
    [
        ("for q in queries.split(500):\n    d = torch.cdist(q, base)", 2,
         "Take 250 at a time in line 1, not 500: queries.split(500)"),
        ("step = 500\nfor i in range(0, len(x), step):\n    y = x[i : i + step] @ w", 3,
         "Lower step from 500 to 250: line 2 takes so many at a time"),
        ("for q in x.chunk(4):\n    y = q @ w", 2, "Make 8 parts in line 1, not 4: x.chunk(4)"),
    ],
)  # fmt: skip
def test_smaller_parts_are_told_with_the_setting_and_its_line(code, line, title) -> None:
    (choice,) = parts.smaller_parts(of_cell(PIECES, code, line, numbers={"step": 500}))
    assert choice.make(choice.guess).title == title


def test_what_is_looked_up_in_fewer_rows_lies_within_them() -> None:
    code = "buffer = Replay(capacity=4000)\nstart = 4000.0\nidx = torch.randint(0, 4000, (64,))\nq = net(buffer.x[idx])"
    (choice,) = batch.numbers(of_cell(PIECES, code, 1, numbers={"capacity": 4000}))
    assert [change.new for change in choice.make(750).changes] == ["750", "750"]
    assert "randint(0, 750, (64,))" in (choice.make(750).edit or "")


def test_a_number_of_the_notebook_is_set_before_the_cell() -> None:
    facts = of_cell(PIECES, "for q in x.split(size):\n    y = q @ w", 2, numbers={"size": 500})
    (choice,) = parts.smaller_parts(facts)
    assert choice.make(choice.guess).first == "size = 250"
    assert choice.goes_on == "%%dryrun --fit size"


def test_an_evaluation_is_run_without_graphs_before_its_results_are_detached() -> None:
    order = advising.TIERS[0]
    assert order.index(kept.graph_in_eval_mode) < order.index(collected.graphs)


def test_a_batch_size_in_an_object_of_settings_is_lowered_there(report_of) -> None:
    report = report_of(
        "batch = cfg.batch_size\nx = torch.ones(cfg.batch_size, 1 << 20, device='simgpu:0').relu()",
        before="class Config: pass\ncfg = Config()\ncfg.batch_size = 100",
    )
    assert report.advice[0].title.startswith("Lower cfg.batch_size from 100 to ")
    assert report.advice[0].covers


def test_a_batch_size_of_settings_is_lowered_where_the_cell_makes_its_loader_of_it(
    report_of,
) -> None:
    report = report_of(
        "loader = torch.utils.data.DataLoader(data, batch_size=cfg.batch_size)\n"
        "for (x,) in loader:\n    y = net(x.to('simgpu:0'))",
        before="class cfg:\n    batch_size = 4096\n"
        "data = torch.utils.data.TensorDataset(torch.randn(8192, 64))\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 16384), torch.nn.ReLU()).to('simgpu:0')",
    )
    assert report.advice[0].title.startswith("Lower cfg.batch_size from 4096 to ")
    assert report.advice[0].covers


@pytest.mark.parametrize(
    ("made", "add"),
    [
        ("history = {'loss': []}", "history['loss'].append(loss)"),
        pytest.param(
            "history = collections.defaultdict(list)",
            "for key in ['loss']:\n        history[key].append(loss)",
            marks=pytest.mark.deep,
        ),
        ("history = types.SimpleNamespace(loss=[])", "history.loss.append(loss)"),
        pytest.param("history = {'loss': 0}", "history['loss'] += loss", marks=pytest.mark.deep),
    ],
)
def test_a_graph_that_a_collection_of_collections_keeps_is_a_leak(report_of, made, add) -> None:
    report = report_of(
        f"{made}\nfor x in data:\n    loss = net(x.to('simgpu:0')).mean()\n    {add}",
        before="import collections, types\ndata = torch.randn(20, 4096, 64)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU()).to('simgpu:0')",
    )
    assert "A leak: history" in report.verdict
    assert report.advice[0].title == "Collect loss without its autograd graph"
    assert report.advice[0].covers


@pytest.mark.parametrize(
    ("add", "title"),
    [
        (
            "history.append({'loss': loss, 'mean': loss.item(), 'n': len(x)})",
            "Collect loss without its autograd graph",
        ),
        pytest.param(
            "history.append((loss, loss * 2, 7))",
            "Collect loss, loss * 2 without their autograd graphs",
            marks=pytest.mark.deep,
        ),
        (
            "history.append(dict(out=net[0](y), loss=loss.detach()))",
            "Collect net[0](y) without its autograd graph",
        ),
    ],
)
def test_a_graph_that_records_keep_is_a_leak_of_all_that_is_made_with_it(
    report_of, add, title
) -> None:
    report = report_of(
        f"history = []\nfor x in data:\n    y = x.to('simgpu:0')\n    loss = net(y).mean()\n    {add}",
        before="data = torch.randn(40, 1024, 64)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(64, 2048), torch.nn.ReLU()).to('simgpu:0')",
    )
    assert "A leak: history holds" in report.verdict
    assert title in [each.title for each in report.advice]


def test_attention_that_einsum_computes_is_recognised(report_of) -> None:
    report = report_of(
        "att = torch.einsum('bhid, bhjd -> bhij', q, k) / 32**0.5\natt = att.softmax(dim=-1)\n"
        "out = torch.einsum('bhij,bhjd->bhid', att, v)",
        before="q = torch.randn(1, 8, 2048, 32, device='simgpu:0')\nk = torch.randn_like(q)\nv = torch.randn_like(q)",
    )
    assert report.advice[0].title == "Attend with 128 queries at a time"
    assert report.advice[0].covers
    assert "scaled_dot_product" not in report.advice[0].edit, "this device has no such kernel"


def test_what_cat_makes_longer_is_joined_in_the_hosts_memory(report_of) -> None:
    report = report_of(
        "probs = torch.empty(0, device='simgpu:0')\nwith torch.no_grad():\n    for chunk in data.chunk(10):\n"
        "        probs = torch.cat((probs, net(chunk.to('simgpu:0')).softmax(-1)))",
        before="data = torch.randn(20000, 64)\nnet = torch.nn.Linear(64, 4096).to('simgpu:0').eval()",
    )
    assert report.advice[0].title == "Collect probs in the host's memory"
    assert report.advice[0].covers


def test_results_that_do_not_fit_without_their_graphs_either_are_collected_in_the_hosts_memory(
    report_of,
) -> None:
    report = report_of(
        "found = []\nfor chunk in data.chunk(10):\n    hidden = net(chunk.to('simgpu:0'))\n    found.append(hidden)",
        before="data = torch.randn(20000, 64)\nnet = torch.nn.Linear(64, 4096).to('simgpu:0')",
    )
    assert report.advice[0].title == "Collect found in the host's memory, without graphs"
    assert "found.append(hidden.detach().cpu())" in report.advice[0].edit
    assert report.advice[0].covers


def test_a_tensor_that_grows_by_results_with_graphs_goes_to_the_host_without_them(
    report_of,
) -> None:
    report = report_of(
        "probs = torch.empty(0, device='simgpu:0')\nfor chunk in data.chunk(10):\n"
        "    probs = torch.cat((probs, net(chunk.to('simgpu:0')).softmax(-1)))",
        before="data = torch.randn(40000, 64)\nnet = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), "
        "torch.nn.Linear(512, 4096)).to('simgpu:0').eval()",
    )
    first = report.advice[0]
    assert first.title == "Collect probs in the host's memory, without graphs"
    assert first.covers
    assert first.edit == (
        "probs = torch.cat((probs.detach().cpu(), net(chunk.to('simgpu:0')).softmax(-1).detach().cpu()))"
    )


def test_an_array_in_double_precision_is_moved_in_single_where_it_came_before_the_line_that_failed(
    report_of,
) -> None:
    report = report_of(
        "X = torch.from_numpy(features).to('simgpu:0')\nX = (X - X.mean(0)) / X.std(0)",
        before="import numpy as np\nfeatures = np.random.randn(25000, 512)",
    )
    assert report.advice[0].title == "Keep features in float32 on the device"
    assert report.advice[0].covers


def test_a_number_of_which_not_even_the_smallest_fits_is_no_suggestion(report_of) -> None:
    report = report_of(
        "batch_size = 1000000\nkept = []\n"
        "for _ in range(9):\n    kept.append(torch.ones((8 << 20) + batch_size, device='simgpu:0'))"
    )
    assert not [each for each in report.advice if "batch_size" in each.title]
    assert any(note == "No batch_size fits alone, not even 1." for note in report.notes)


@pytest.fixture
def report_of(bare_shell, empty_devices):
    simgpu.enable(devices=2, memory="256MiB")
    bare_shell.run_line_magic("load_ext", "gpumagic")
    bare_shell.run_line_magic("config", "GPUMagic.advice_seconds = 120")
    bare_shell.run_cell("import torch", store_history=True)

    def run(cell: str, before: str = "pass"):
        bare_shell.run_cell(before, store_history=True)
        bare_shell.run_cell(f"%%oomguard -o report\n{cell}", store_history=True)
        return bare_shell.user_ns["report"]

    yield run
    bare_shell.run_line_magic("unload_ext", "gpumagic")
    forget_everything(bare_shell)
    torch.simgpu.empty_cache()
    simgpu.enable(devices=2, memory="4GiB")  # as the other tests have them


MADE = """
net = torch.nn.Sequential(*[torch.nn.Linear(1600, 1600) for _ in range(8)]).to("simgpu:0")
opt = torch.optim.AdamW(net.parameters())
x = torch.ones(4096, 1600)"""
TRAINS = """\
inputs = x.to("simgpu:0")
with torch.autocast("simgpu", dtype=torch.bfloat16):
    loss = net(inputs).square().mean()
opt.zero_grad()
loss.backward()
opt.step()"""


def test_two_that_help_only_together_are_told_as_one(report_of) -> None:
    """The cell needs most in its step, and nearly as much in its backward pass: each of the two lowers one of these."""
    first = report_of(TRAINS, MADE).advice[0]
    assert (
        first.title
        == "Train on 16 parts of inputs, one after the other; replace AdamW by Adafactor"
    )
    assert first.covers
    compile(first.edit, "<edit>", "exec")


CHUNKS = """
def fill(device):
    free, total = torch.accelerator.get_memory_info(device)
    return [torch.ones(total // 32, device=device) for _ in range(9)]
chunks = fill(0)"""


def test_a_list_that_fills_the_device_has_a_first_suggestion_that_fits(report_of) -> None:
    report = report_of(CHUNKS)
    assert report.advice[0].title == "Collect what the list is made of in the host's memory"
    assert report.advice[0].covers


def test_what_a_dict_is_made_of_is_collected_in_the_hosts_memory() -> None:
    code = "feats = {k: net(v.to(device)) for k, v in shots.items()}"
    (advice,) = collected.comprehension(of_cell(PIECES, code, 1))
    assert advice.edit == "feats = {k: net(v.to(device)).cpu() for k, v in shots.items()}"


def test_a_dry_run_refuses_operands_of_different_types_as_a_device_does() -> None:
    simgpu.enable(devices=2, memory="4GiB")
    code = "net = torch.nn.Linear(64, 64).to('simgpu:0').bfloat16()\nnet(torch.ones(8, 64, device='simgpu:0'))"
    assert (
        "must have the same dtype"
        in gpumagic.dry_run(code, {"torch": torch}, device="simgpu:0").error
    )


def test_ctrl_c_between_two_dry_runs_leaves_the_report(report_of, monkeypatch) -> None:
    def interrupting(facts):
        os.kill(os.getpid(), signal.SIGINT)
        yield from ()

    monkeypatch.setattr(
        advising, "TIERS", ((interrupting, collected.comprehension), (), (), (), (), ())
    )
    report = report_of(CHUNKS)
    assert report.need is not None
    assert [each.covers for each in report.advice] == [None]
    assert any("Not all advice was tried: interrupted" in note for note in report.notes)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_search_that_is_cut_short_says_so_and_how_it_goes_on(report_of, monkeypatch) -> None:
    def cut_short(dry_run, *_, **__):
        dry_run(20)
        raise number_choice._CutShort

    monkeypatch.setattr("gpumagic.dryrun.fitting.search", cut_short)
    first = report_of(
        "batch_size = 100\nx = torch.ones(batch_size, 1 << 20, device='simgpu:0').relu()"
    ).advice[0]
    assert first.covers
    assert first.evidence.endswith(
        "the search was cut short, more may fit: %%dryrun --fit batch_size"
    )


@pytest.mark.parametrize(
    ("needs", "told"), [({2: 90, 40: 240, 80: 500}, 40), ({2: 300, 40: 400, 80: 500}, 40)]
)
def test_where_it_is_open_whether_any_number_fits_no_extreme_is_told(
    report_of, monkeypatch, needs, told
) -> None:
    """With 2 rows it would be as open as with 40, and nobody takes 2."""
    whole = run.dry_run

    def search(dry_run, *_, **__):
        for number in needs:
            dry_run(number)

    def dry_run(script, *args, **more):
        report, lines = whole(script, *args, **more), script.source.splitlines()
        number = next((int(line[13:]) for line in lines if line.startswith("batch_size = ")), 100)
        if number == 100:
            return report
        (one,) = report.devices[:1]
        peak = (
            needs.get(number, needs[2] + 10) * MIB
        )  # of the number that is tried before the search, too
        devices = (one._replace(peak=peak), *report.devices[1:])
        return replace(
            report,
            fits=None,
            complete=True,
            open_on=((2, "x"),),
            devices=devices,
            peak={one.device: peak},
        )

    monkeypatch.setattr("gpumagic.dryrun.fitting.search", search)
    monkeypatch.setattr(run, "dry_run", dry_run)
    report = report_of(
        "batch_size = 100\nx = torch.ones(batch_size, 1 << 20, device='simgpu:0').relu()"
    )
    (lower,) = [each for each in report.advice if "batch_size" in each.title]
    assert lower.title == f"Lower batch_size from 100 to {told}"
    assert lower.covers is None
    assert lower.trial.reason == "it depends on `x`", (
        "the line's number would be that of a text that nobody sees"
    )


def test_where_nothing_fits_the_smallest_gpu_is_named_on_which_the_cell_was_dry_run(
    report_of,
) -> None:
    simgpu.enable(devices=1, memory="4GiB")
    report = report_of("x = torch.ones(10 << 30, dtype=torch.uint8, device='simgpu:0')\ny = x + x")
    first = report.advice[0]
    assert first.title == "Use a larger GPU, such as an L4 (22.0 GiB)"
    assert (first.gpu, first.covers, first.trial.needs) == ("L4", True, 20 * GIB)
    assert "Nothing that was tried fits on simgpu:0" in str(report)


def test_a_gpu_on_which_a_dry_run_fails_is_not_named() -> None:
    need = Need(14 * GIB, 10 * GIB, fits=False, certain=True)
    no = EditTrial(fits=False, needs=16 * GIB, available=15 * GIB)
    told = Told({"Use a larger GPU, such as an L4 (22.0 GiB)": no})
    titles = [each.title for each in advising.advise(changed(PIECES, need=need), told)]
    assert titles[-1] == "Use a larger GPU, such as an A10G (22.1 GiB)"


def test_the_first_that_fits_is_shown_while_what_costs_more_is_tried(monkeypatch) -> None:
    shown = []
    monkeypatch.setattr(advising.progress, "known", shown.append)
    tried = ("fails", 0, FAILS, None), ("fits", 1, FITS, None), ("fits too", 2, FITS, None)
    assert ranked(monkeypatch, *tried)[0] == "fits"
    (document,) = shown
    assert render(document).splitlines()[0] == "fits: fits (dry run: 10.0 of 15.0 GiB)"


def test_what_frees_too_little_is_tried_only_where_nothing_else_fits(monkeypatch) -> None:
    tried = []
    monkeypatch.setattr(
        Told,
        "of",
        lambda self, *edits: tried.append(edits[0].title) or self._outcomes[edits[0].title],
    )
    ranked(monkeypatch, ("crumbs", 0, FAILS, GIB // 2), ("fits", 2, FITS, None))
    assert tried == ["fits"]
    tried.clear()
    ranked(monkeypatch, ("crumbs", 0, FAILS, GIB // 2), ("fails", 2, FAILS, None))
    assert tried[:2] == ["fails", "crumbs"]
