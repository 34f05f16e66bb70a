"""The report of `all.py`: one HTML page that holds tables, figures and results of every experiment."""

import base64
import html
import json
import re
import urllib.parse
from pathlib import Path

import common

PICTURES = {".png": "image/png", ".gif": "image/gif"}
EMBEDDED_JSON = 300_000  # characters of a result that the report holds; the rest is in the file

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #111; --quiet: #555; --box: #f4f4f4;
        --line: #ccc; --link: #0B57A4; --bad: #A03000; }
@media (prefers-color-scheme: dark) {
  :root { --page: #15181c; --text: #e6e6e6; --quiet: #a8adb3; --box: #22262c; --line: #444a52;
          --link: #8ab8ff; --bad: #ff9a6a; } }
body { font: 17px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; padding: 0 1em;
       color: var(--text); background: var(--page); overflow-wrap: break-word; }
a { color: var(--link); }
h1, h2 { line-height: 1.2; }
h2 { margin-top: 2.5em; border-top: 1px solid var(--line); padding-top: 1em; }
pre { background: var(--box); padding: .8em 1em; font-size: 13px; line-height: 1.4;
      white-space: pre-wrap; overflow-wrap: anywhere; }
pre.table { white-space: pre; overflow-x: auto; }
.wide { overflow-x: auto; }
img { max-width: 100%; height: auto; display: block; margin: 1em 0; background: #fff; }
table { border-collapse: collapse; } td, th { padding: .25em .8em .25em 0; text-align: left;
       vertical-align: top; border-bottom: 1px solid var(--line); overflow-wrap: normal; }
td.n { text-align: right; } td.q { min-width: 16em; }
.failed { color: var(--bad); font-weight: bold; } .skipped { color: var(--quiet); }
summary { cursor: pointer; margin: .4em 0; }
"""


def escaped(text):
    return html.escape(str(text), quote=True)


def picture(path, words):
    """A picture as an <img> that holds its bytes; `words` say what it shows."""
    data = base64.b64encode(path.read_bytes()).decode()
    kind = PICTURES[path.suffix]
    return f'<img alt="{escaped(words)}" src="data:{kind};base64,{data}">'


def link(file):
    """A page of the script's own, which lies beside the report."""
    return f'<p>See <a href="{urllib.parse.quote(file)}">{escaped(file)}</a>.</p>'


def printed(text):
    """What a script printed: prose wraps, and a table, which must not, scrolls."""
    parts = re.split(r"\n{2,}", text.strip("\n"))
    tables = [re.search(r"^ *-{3,}$", part, re.MULTILINE) for part in parts]
    return "\n".join(
        f'<pre class="{"table" if is_table else "prose"}">{escaped(part)}</pre>'
        for part, is_table in zip(parts, tables, strict=True)
    )


def folded(title, text):
    return f"<details><summary>{escaped(title)}</summary><pre>{escaped(text)}</pre></details>"


def result_of(folder, name, files):
    """The JSON that a script wrote in this run; {} where there is none."""
    if f"{name}.json" not in files:
        return {}
    return json.loads((folder / f"{name}.json").read_text("utf-8"))


def section(out, entry):
    """One experiment's part of the report."""
    name, status = entry["name"], entry["status"]
    parts = [f'<h2 id="{name}">{name}</h2>', f"<p>{escaped(entry['question'])}</p>"]
    if entry["reason"]:
        parts.append(f'<p class="{status}">{status}: {escaped(entry["reason"])}</p>')
    parts.append(f"<pre>{escaped(entry['command'])}</pre>")
    for file in entry["files"]:
        if Path(file).suffix in PICTURES:
            parts.append(picture(out / file, f"{name}: {entry['question']}"))
        elif Path(file).suffix == ".html":
            parts.append(link(file))
    if entry.get("output"):
        parts.append(printed(entry["output"]))
    if status == "failed" and entry.get("errors"):
        parts.append(folded("Error stream", entry["errors"][-20_000:]))
    result = result_of(out, name, entry["files"])
    if result:
        environment = json.dumps(result.pop("environment", {}), indent=2, ensure_ascii=False)
        text = json.dumps(result, indent=1, ensure_ascii=False)
        if len(text) > EMBEDDED_JSON:
            text = text[:EMBEDDED_JSON] + f"\n... cut; the whole is in {name}.json"
        parts += [folded("Environment", environment), folded("Result (JSON)", text)]
    return "\n".join(parts)


def page(args, entries, environment, seconds):
    """The whole report as one HTML document."""
    counts = {s: sum(e["status"] == s for e in entries) for s in ("done", "failed", "skipped")}
    rows = "\n".join(
        f'<tr><td><a href="#{e["name"]}">{e["name"]}</a></td><td class="q">{escaped(e["question"])}</td>'
        f'<td class="{e["status"]}">{e["status"]}</td><td class="n">{e["seconds"]:.0f}</td></tr>'
        for e in entries
    )
    facts = "\n".join(
        f"<tr><td>{escaped(k)}</td><td>{escaped(v)}</td></tr>" for k, v in environment.items()
    )
    mode = "quick: small data, a first look" if args.quick else "full"
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>paxattn: experiments</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body>
<h1>paxattn: every experiment</h1>
<p>{counts["done"]} done, {counts["failed"]} failed, {counts["skipped"]} skipped, in
{seconds / 60:.1f} minutes ({mode}; seed {args.seed}). Drawn by <code>{escaped(common.command())}</code>.</p>
<div class="wide"><table>
<tr><th>experiment</th><th>question</th><th>status</th><th>seconds</th></tr>
{rows}
</table></div>
<h2>Machine</h2>
<div class="wide"><table>
{facts}
</table></div>
{"".join(section(args.out, e) for e in entries)}
</body></html>
"""
