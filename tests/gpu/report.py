"""Write the report of the test on GPUs, as JSON and as text that people read."""

import json

WITHOUT_GPUS = (
    "**No GPU was used.** The parts ran on logical CPUs, which shows that they run. The last column says what that is worth.\n"
    "What *holds* is a fact about this machine. *The same graph, other kernels* tests keras_dp, and no kernel of GPUs. What\n"
    "*means nothing* is about copies, speed or memory of GPUs, of which CPUs say nothing."
)


def write(results, about, directory):
    """Writes report.json and report.md into a directory: the results of `run_parts`, and facts about the run by name."""
    (directory / "report.json").write_text(json.dumps({**about, "parts": results}, indent=1), encoding="utf-8")
    (directory / "report.md").write_text(text(results, about), encoding="utf-8")


def text(results, about):
    """Returns the whole report: a summary with a line for each part, and a section for each part."""
    facts = [f"- {name.replace('_', ' ')}: {_cell(value)}" for name, value in about.items()]
    lines = ["# keras_dp on this machine", "", *facts, "", *_summary(results)]
    for result in results:
        lines += ["", *section(result)]
    return "\n".join(lines) + "\n"


def section(result):
    """Returns the lines about one part."""
    lines = [f"## {result['name']}: {result['teaches']}", "", f"{result['result']}, in {result['seconds']} s"]
    if result.get("devices"):
        lines[-1] += f", on {result['devices']}"
    for title, rows in result.get("tables", {}).items():
        lines += ["", f"**{title}**", "", *_table(rows)]
    lines += _list("Not within its limit:", result.get("different", ()))
    lines += _list("", result.get("remarks", ()))
    if result["error"]:
        lines += ["", "The last lines of its output:", "", "```", *result["error"], "```"]
    return lines


def headline(result):
    """Returns the line about a part that is printed when it has ended."""
    return f"{result['name']:<14} {result['result']:<13} {result['seconds']:>6} s  {_says(result)}"


def _says(result):
    return result.get("finding") or (result["error"][-1] if result["error"] else "")


def _summary(results):
    on_cpus = any(result.get("devices") and not result["gpus"] for result in results)
    rows = [
        {"part": result["name"], "result": result["result"], "s": result["seconds"], "finding": _says(result)}
        | ({"without a GPU": result["without_gpus"]} if on_cpus else {})
        for result in results
    ]
    return [*([WITHOUT_GPUS, ""] if on_cpus else []), *_table(rows)]


def _list(title, entries):
    return ["", *([title, ""] if title else []), *(f"- {entry}" for entry in entries)] if entries else []


def _table(rows):
    """Returns a table of Markdown whose columns are aligned, so that it is legible as text too."""
    columns = list(rows[0])
    cells = [[name.replace("_", " ") for name in columns], *([_cell(row[name]) for name in columns] for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(columns))]
    right = [all(_is_number(row[name]) or row[name] is None for row in rows) for name in columns]

    def line(row):
        aligned = zip(row, widths, right, strict=True)
        return f"| {' | '.join(cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in aligned)} |"

    rule = [("-" * (width - 1) + ":") if is_right else "-" * width for width, is_right in zip(widths, right, strict=True)]
    return [line(cells[0]), f"| {' | '.join(rule)} |", *map(line, cells[1:])]


def _is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value):
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1e}" if value and (abs(value) < 1e-2 or abs(value) >= 1e6) else f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/").replace("\n", " ")
