"""The list of a survey is worked off, whatever happens to an item."""

from families import rows


def test_an_item_that_raises_has_a_row_and_the_next_ones_are_tried(tmp_path, capsys):
    """`divmod` of a number and a folder raises, in the process that judges."""

    def ended(item, why, seconds):
        return {"item": item, "why": why}

    rows.work_off([1, 2, 3, 4, 5], divmod, ended, str, tmp_path / "rows.jsonl")
    found = rows.read(tmp_path / "rows.jsonl")
    assert sorted(row["item"] for row in found) == [1, 2, 3, 4, 5]
    assert all(row["why"].startswith("TypeError: unsupported operand") for row in found)
