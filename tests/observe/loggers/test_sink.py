from pathlib import Path

from wellfed.observe.loggers.sink import Sink


def test_no_sink_takes_everything():
    sink = Sink()
    assert sink.log({"step": 1, "train/loss": None}) is None
    assert sink.table("findings", ("id",), [["healthy"]]) is None
    assert sink.file("report", Path("report.html")) is None
    assert sink.finish({"a": 1}, 0) is None


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
