"""Documents as tests read them: text, strict JSON, and rows of CSV."""

import csv
import io
import json

from cgprof.report.formats import OutputFormat


def text_of(document):
    return document.render(OutputFormat.TEXT)


def strict(text):
    """JSON without NaN and infinity."""

    def refuse(word):
        raise AssertionError(f"{word} in JSON")

    return json.loads(text, parse_constant=refuse)


def data_of(document):
    return strict(document.render(OutputFormat.JSON))


def rows_of(document, table=None):
    """Rows of a table, all cells texts."""
    return list(csv.DictReader(io.StringIO(document.render(OutputFormat.CSV, table))))
