"""Every input of the table works, or ends in one line that says what is wrong, where, and what to do."""

import os

import pytest

from inputs.case import Case, make_base
from inputs.table import TABLE
from layerproof.errors import UserError

pytestmark = pytest.mark.slow

ROWS = [pytest.param(*row, id=row[0]) for rows in TABLE.values() for row in rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    return folder


@pytest.fixture
def case(base, tmp_path):
    here = os.getcwd()
    yield Case(tmp_path / "run", base)
    os.chdir(here)


@pytest.mark.parametrize(("what", "change", "says"), ROWS)
def test_an_input_works_or_ends_in_one_clear_line(case, what, change, says):
    change(case)
    if says is None:
        case.judge()
        return
    with pytest.raises(UserError) as raised:
        case.judge()
    message = str(raised.value)
    assert says in message
    assert "\n" not in message
    assert len(message) < 500


def test_the_table_is_long_and_names_no_row_twice():
    names = [row[0] for rows in TABLE.values() for row in rows]
    assert len(names) >= 150
    assert len(names) == len(set(names))
