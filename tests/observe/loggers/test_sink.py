from pathlib import Path

from wellfed.observe.loggers.sink import Sink


def test_several_get_the_same():
    class Kept(Sink):
        def __init__(self):
            self.got = []

        def log(self, row):
            self.got.append(dict(row))

        def table(self, *given):
            self.got.append(given)

        def file(self, *given):
            self.got.append(given)

        def finish(self, summary, exit_code):
            self.got.append((dict(summary), exit_code))

    kept = [Kept(), Kept()]
    sinks = Sink(*kept)
    sinks.log({"step": 1})
    table, page = ("findings", ("id",), [["healthy"]], 3), ("report", Path("report.html"), 3)
    sinks.table(*table)
    sinks.file(*page)
    sinks.finish({"a": 1}, 3)
    assert [one.got for one in kept] == [[{"step": 1}, table, page, ({"a": 1}, 3)]] * 2
