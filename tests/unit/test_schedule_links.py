"""Rows of integers laid end to end: as lists, moved, joined, and several of them in one array."""

from entrain_opt.schedule.links import Links, Rows

ROWS = [[3, 1], [], [4], [1, 5, 9]]


def test_rows_come_back_as_they_were_given():
    rows = Rows.of(ROWS)
    assert len(rows) == 4
    assert list(rows) == ROWS
    assert [rows[i] for i in range(4)] == ROWS
    assert rows.row_of_value.tolist() == [0, 0, 2, 3, 3, 3]
    assert list(rows.plus(10)) == [[13, 11], [], [14], [11, 15, 19]]
    assert list(Rows.join([rows, Rows.of([]), rows])) == ROWS + ROWS
    assert list(Rows.join([])) == []


def test_links_say_where_each_row_lies():
    links, given = Links(), [Rows.of(ROWS), Rows.of([]), Rows.of([[7], [8, 2]])]
    ranges = [links.add(rows) for rows in given]
    values = links.joined()
    for rows, (starts, ends) in zip(given, ranges, strict=True):
        found = [values[start:end].tolist() for start, end in zip(starts, ends, strict=True)]
        assert found == list(rows)
