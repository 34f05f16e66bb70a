"""The simulator against a step-by-step one in plain Python, and the memory experiments' claims."""

import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from memory_oracle import Blocks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "experiments"))

import admission
import batch_allocation
import common
import concurrency_table
import dynamic_growth
import external_fragmentation
import internal_fragmentation
import memory_waste
import page_churn
import simulator


def outcome(module, tmp_path, *words):
    """Run a script's work in this process; its JSON."""
    name = module.__name__
    parser = common.parser(module.__doc__, name)
    if hasattr(module, "options"):
        module.options(parser)
    args = parser.parse_args(["--quick", "--out", str(tmp_path), *words])
    common.check_writable(args)
    module.run(args)
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    return json.loads((tmp_path / f"{name}.json").read_text())


# --- the simulator ----------------------------------------------------------------------------


class Pages:
    """Pages counted, not named."""

    def __init__(self, pages, size, watermark):
        self.pages, self.size, self.watermark, self.held = pages, size, watermark, {}

    def need(self, tokens):
        return -(-tokens // self.size)

    def free(self):
        return self.pages - sum(self.need(n) for n in self.held.values())

    def admit(self, request, length, final):
        left = self.free() - self.need(length)
        if left < (self.watermark if self.held else 0):
            return None
        self.held[request] = length
        return 0

    def grow(self, running):
        more = {request: length + 1 for request, length in running.items()}
        if sum(map(self.need, more.values())) > self.pages:
            return False
        self.held = more
        return True

    def leave(self, request):
        del self.held[request]


class Regions(Blocks):
    """Buddy blocks for each request."""

    def __init__(self, capacity, region):
        super().__init__(capacity)
        self.region = region

    def admit(self, request, length, final):
        size = self.region(length, final)
        return size if self.place(request, size) else None

    def grow(self, running):
        return True

    def leave(self, request):
        self.free_row(request)


def plain(store, rows, prompt, total, arrival):
    """Step by step: the sums over all steps that the simulator reports, and the events."""
    queue = list(range(len(prompt)))
    length, owned, running = dict(enumerate(prompt)), {}, {}
    sums = dict.fromkeys(("steps", "running", "used", "final", "owned", "left", "preempted"), 0)
    now, blocked = 0, False
    while queue or running:
        for request in [r for r in running if running[r] >= total[r]]:
            store.leave(request)
            del running[request]
            sums["left"] += 1
            blocked = False
        while queue and arrival[queue[0]] <= now and len(running) < rows and not blocked:
            head = queue[0]
            given = store.admit(head, length[head], total[head])
            if given is None:
                blocked = True
                break
            owned[head], running[head] = given, length[head]
            queue.pop(0)
        if not running:
            if queue:
                now += 1
            continue
        if any(running[r] >= total[r] for r in running):
            continue
        if not store.grow(running):
            youngest = max(running)
            store.leave(youngest)
            length[youngest] = running.pop(youngest)
            queue.insert(0, youngest)
            sums["preempted"] += 1
            blocked = True
            continue
        running = {r: n + 1 for r, n in running.items()}
        now += 1
        sums["steps"] += 1
        sums["running"] += len(running)
        sums["used"] += sum(running.values())
        sums["final"] += sum(total[r] for r in running)
        if isinstance(store, Pages):
            sums["owned"] += sum(store.need(n) * store.size for n in running.values())
        else:
            sums["owned"] += sum(owned[r] for r in running)
    return sums


def ours(result):
    events = result.events
    active = events.running > 0
    return {
        "steps": int(events.steps[active].sum()),
        "running": int((events.steps * events.running)[active].sum()),
        "used": int(events.used.sum()),
        "final": int(events.final.sum()),
        "owned": int(events.owned.sum()),
        "left": int(events.left.sum()),
        "preempted": int(events.preempted.sum()),
    }


@pytest.fixture(scope="module")
def requests():
    rng = np.random.default_rng(3)
    prompt, output = rng.integers(1, 60, 250), rng.integers(0, 90, 250)
    return prompt, output, np.sort(rng.integers(0, 1500, 250))


@pytest.mark.parametrize("arrivals", [True, False])
def test_pages_are_simulated_exactly_preemption_included(requests, arrivals):
    prompt, output, arrival = requests
    when = arrival if arrivals else np.zeros_like(arrival)
    policy = admission.paged(41, 12, 160, 8, watermark=2)
    result = simulator.run(policy, prompt, output, when if arrivals else None)
    expected = plain(Pages(40, 8, 2), 12, prompt.tolist(), (prompt + output).tolist(), when)
    assert ours(result) == expected
    assert expected["preempted"] > 20
    assert result.events.waste.max() < 8
    assert sum(result.slots().values()) == 320 * int(result.events.steps.sum())


@pytest.mark.parametrize("name", ["orca_max", "orca_pow2", "orca_oracle"])
def test_reservations_are_simulated_exactly(requests, name):
    prompt, output, arrival = requests

    def pow2(prompt, final):
        size = 1
        while size < final - prompt:
            size *= 2
        return min(prompt + size, 256)

    region = {
        "orca_max": lambda prompt, final: 256,
        "orca_pow2": pow2,
        "orca_oracle": lambda prompt, final: final,
    }[name]
    result = simulator.run(admission.orca(900, 12, 256)[name], prompt, output, arrival)
    expected = plain(Regions(900, region), 12, prompt.tolist(), (prompt + output).tolist(), arrival)
    assert ours(result) == expected
    share = result.percent(waiting=True)
    assert sum(share.values()) == pytest.approx(100, abs=1e-9)


def test_what_cannot_be_simulated_is_refused():
    policy = admission.paged(11, 4, 160, 16)
    run = functools.partial(simulator.run, policy)
    with pytest.raises(ValueError, match="no requests"):
        run(np.array([], int), np.array([], int))
    with pytest.raises(ValueError, match="request 1 needs 161 token slots"):
        run(np.array([5, 100]), np.array([5, 61]))
    with pytest.raises(ValueError, match="request 0 has 0 prompt"):
        run(np.array([0]), np.array([4]))
    with pytest.raises(ValueError, match="-1 output"):
        run(np.array([3]), np.array([-1]))


def test_requests_without_output_leave_without_a_step():
    result = simulator.run(admission.paged(11, 2, 160, 16), np.full(5, 20), np.zeros(5, int))
    assert int(result.events.left.sum()) == 5
    assert int(result.events.steps.sum()) == 0
    assert result.mean_running() == 0


# --- the scripts ------------------------------------------------------------------------------


def test_the_papers_figure_2(tmp_path):
    found = outcome(memory_waste, tmp_path)
    for name, used in {
        "orca_max": 20.4,
        "orca_pow2": 26.8,
        "orca_oracle": 38.2,
        "paged": 96.3,
    }.items():
        policy = found["policies"][name]
        assert policy["used"] == pytest.approx(used, abs=4)
        parts = [policy[part] for part in ("used", "reserved", "internal", "external")]
        assert sum(parts) == pytest.approx(100, abs=1e-9)
    for name, batched in {"orca_max": 7.00, "orca_pow2": 9.81, "orca_oracle": 13.62}.items():
        assert found["policies"][name]["requests_batched"] == pytest.approx(batched, rel=0.12)
    assert found["policies"]["paged"]["largest_waste_tokens"] < 16


def test_a_trace_of_long_requests_fills_its_pages(tmp_path):
    rng = np.random.default_rng(0)
    lengths = zip(rng.integers(500, 3000, 120), rng.integers(1, 300, 120), strict=True)
    path = tmp_path / "long.csv"
    path.write_text("prompt_tokens,output_tokens\n" + "".join(f"{a},{b}\n" for a, b in lengths))
    found = outcome(memory_waste, tmp_path, "--trace", str(path))
    assert found["policies"]["paged"]["used"] >= 98


@pytest.mark.slow
def test_the_claim_of_24_and_38_requests(tmp_path):
    found = outcome(concurrency_table, tmp_path)
    matched = found["matched"]
    assert matched["paged"]["concurrent"] == pytest.approx(38, abs=2)
    assert matched["contiguous"]["concurrent"] == pytest.approx(24, abs=0.5)
    assert found["policies"]["paged"]["utilization_percent"] > 93


def test_ten_of_2048_slots(tmp_path):
    found = outcome(internal_fragmentation, tmp_path)
    assert found["example"] == {
        "needed": 10,
        "contiguous_slots": 2048,
        "contiguous_wasted": 2038,
        "paged_slots": 16,
        "paged_wasted": 6,
    }
    assert found["policies"]["paged"]["wasted_max"] < 16


def test_30_percent_free_and_a_request_waits_but_never_on_pages(tmp_path):
    found = outcome(external_fragmentation, tmp_path, "--requests", "150")
    worst = found["worst"]
    assert worst["free_percent"] >= 30
    assert worst["largest_hole"] < worst["needed"] <= worst["free_slots"]
    assert found["paged"]["refused_with_enough_free"] == 0
    assert (tmp_path / "external_fragmentation.gif").read_bytes()[:6] == b"GIF89a"


def test_a_cache_of_released_pages_saves_transactions(tmp_path):
    found = outcome(page_churn, tmp_path, "--steps", "200")
    assert found["transactions_saved_percent"] > 90
    moved = [row["transactions_per_request"] for row in found["by_cache"]]
    assert moved == sorted(moved, reverse=True)


def test_memory_over_a_life(tmp_path):
    found = outcome(dynamic_growth, tmp_path)
    slots = found["slots"]
    assert set(slots["reserve_max"]) == {2048}
    assert slots["paged"][:2] == [176, 176]  # 161 and 162 tokens in pages of 16
    assert found["copied_tokens"]["grow_and_copy"] == sum(range(161, 161 + 64))


@pytest.mark.slow
def test_a_batch_in_a_large_pool_needs_no_more_memory(tmp_path):
    found = outcome(batch_allocation, tmp_path)
    assert len({row["temporary_bytes"] for row in found["by_pool"]}) == 1
    assert found["by_batch"][-1]["batch"] == 1024


BAD = {
    "bad line": ("prompt_tokens,output_tokens\n5,7\n5,x\n", r"bad\.csv.*line 3"),
    "empty": ("", r"bad\.csv.*empty"),
    "too long": ("prompt_tokens,output_tokens\n9000,7\n", "9,007"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("module", [internal_fragmentation, external_fragmentation])
def test_bad_traces_end_with_one_clear_line(module, name, tmp_path, capsys, monkeypatch):
    text, message = BAD[name]
    path = tmp_path / "bad.csv"
    path.write_text(text)
    words = ["--quick", "--out", str(tmp_path), "--trace", str(path)]
    words += ["--max-len" if module is internal_fragmentation else "--capacity", "2048"]
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py"])
    with pytest.raises(SystemExit) as end:
        common.main(module.__doc__, module.run, module.options, words)
    assert end.value.code == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
