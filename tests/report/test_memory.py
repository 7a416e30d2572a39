from cgprof.record.graph import MemoryTotals, MemoryWitness
from cgprof.record.types import RankRecord
from cgprof.report.memory import totals_table


def test_totals_say_what_is_known_of_other_processes():
    def totals(plain, twins):
        return MemoryTotals(
            source="device",
            outputs_bytes=0,
            plain_bytes=0,
            twin_bytes=0,
            plain_witness=MemoryWitness(allocator_bytes=0, neighbours=plain),
            twin_witness=MemoryWitness(allocator_bytes=0, neighbours=twins),
            kv_cache_bytes=0,
            weights_bytes=0,
        )

    for plain, twins, word in (
        ("none", "moved", "moved"),
        ("none", "unknown", "unknown"),
        ("still", "none", "still"),
        ("none", "none", "none"),
    ):
        text = totals_table(RankRecord(totals=totals(plain, twins))).to_text()
        assert f"other processes on the device: {word}" in text
    assert "other processes" not in totals_table(RankRecord(totals=totals(None, None))).to_text()


def test_totals_name_the_communicators():
    held = MemoryWitness(allocator_bytes=0)
    totals = MemoryTotals(
        source="device",
        outputs_bytes=0,
        plain_bytes=0,
        twin_bytes=0,
        plain_witness=held,
        twin_witness=held,
        kv_cache_bytes=0,
        weights_bytes=0,
        communicators={"captured": 5 << 20, "eager": 3 << 20},
        finish_graphs_bytes=7 << 20,
    )
    rows = {row["what"]: row for row in totals_table(RankRecord(totals=totals)).records()}
    assert rows["communicator of graphs"]["headline_bytes"] == 5 << 20
    assert rows["communicator of eager calls"]["headline_bytes"] == 3 << 20
    (told,) = [row for what, row in rows.items() if "greedy tokens" in what]
    assert told["headline_bytes"] == 7 << 20
