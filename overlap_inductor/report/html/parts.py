"""The document around a report: style and script inline, nothing loaded, light or dark as the reader's browser is."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; --bg: #f7f8fa; --card: #fff; --ink: #1b2330; --quiet: #5d6878; --line: #dde2ea;
  --good: #1a7f4b; --wait: #6b7686; --warn: #b3600a; --bad: #c0303b; --accent: #2f5fd0; --ins: #e2f5e9; --del: #fdeaea;
  --matmul: #3d6fe0; --transfer: #e08a2c; --lane: #eef1f6; }
@media (prefers-color-scheme: dark) { :root { --bg: #12161d; --card: #1a2029; --ink: #e2e7ef; --quiet: #97a3b5; \
--line: #2d3644;
  --good: #4cc38a; --wait: #9aa5b5; --warn: #f0a04b; --bad: #f2727b; --accent: #86a9ff; --ins: #16352a; --del: #3d2027;
  --matmul: #6b95f5; --transfer: #e39a4a; --lane: #222a35; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 14px/1.5 system-ui, sans-serif; }
main { max-width: 1320px; margin: 0 auto; padding: 28px 24px 80px; }
h1 { font-size: 22px; line-height: 1.3; margin: 0 0 2px; }
h2 { font-size: 16px; margin: 36px 0 10px; }
code, pre, .mono { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12.5px; }
.quiet { color: var(--quiet); }
nav { display: flex; gap: 16px; margin-top: 12px; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
.card, .tile, figure { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(128px, 1fr)); gap: 12px; margin: 20px 0 10px; }
.tile { padding: 12px 16px; border-top: 3px solid var(--tone, var(--line)); }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); }
.tile.wide { grid-column: span 2; }
.good { --tone: var(--good); } .wait { --tone: var(--wait); } \
.warn { --tone: var(--warn); } .bad { --tone: var(--bad); }
.share { display: flex; height: 8px; border-radius: 4px; overflow: hidden; gap: 2px; }
.share i { background: var(--tone); }
.note { border-left: 3px solid var(--accent); padding: 8px 14px; margin: 12px 0; \
background: var(--card); overflow-wrap: anywhere; }
.tools { display: flex; gap: 8px; align-items: center; margin-bottom: 8px; flex-wrap: wrap; }
input, button { font: inherit; color: inherit; background: var(--card); border: 1px solid var(--line);
  border-radius: 6px; padding: 5px 10px; }
input { width: min(380px, 100%); }
button { cursor: pointer; }
button:hover { border-color: var(--accent); }
.scroll { overflow-x: auto; }
.sites { min-width: 960px; }
.row { display: grid; grid-template-columns: \
minmax(220px, 2.3fr) 52px minmax(150px, 1.2fr) minmax(200px, 1.8fr) minmax(200px, 2fr);
  gap: 14px; padding: 8px 14px; align-items: baseline; }
.row > * { overflow-wrap: anywhere; }
.row.head { color: var(--quiet); border-bottom: 1px solid var(--line); }
.sites details + details { border-top: 1px solid var(--line); }
.sites summary { cursor: pointer; list-style: none; }
.sites summary::-webkit-details-marker { display: none; }
.sites summary:hover { background: var(--lane); }
.sites summary .name::before { content: "\\25B8"; display: inline-block; width: 15px; color: var(--quiet); }
.sites details[open] > summary .name::before { content: "\\25BE"; }
.detail { padding: 4px 29px 18px; }
.detail h3 { font-size: 13px; margin: 14px 0 4px; color: var(--quiet); font-weight: 600; }
.chip { color: var(--tone); border: 1px solid var(--tone); border-radius: 10px; \
padding: 0 8px; font-size: 12px; white-space: nowrap; }
.members { columns: 360px; padding: 0; margin: 0; list-style: none; }
.members li { break-inside: avoid; overflow-wrap: anywhere; }
table { border-collapse: collapse; }
td, th { text-align: left; padding: 4px 18px 4px 0; vertical-align: baseline; \
font-weight: normal; overflow-wrap: anywhere; }
th { color: var(--quiet); }
.card > table { margin: 8px 14px; }
.bars { display: grid; grid-template-columns: max-content minmax(60px, 320px) max-content; \
gap: 2px 12px; align-items: center; }
.bars i { display: block; height: 10px; border-radius: 3px; background: var(--wait); }
.bars i.best { background: var(--good); }
.reason { padding: 10px 14px; }
.reason + .reason { border-top: 1px solid var(--line); }
.reason p { margin: 2px 0; overflow-wrap: anywhere; }
figure { margin: 0 0 14px; padding: 14px 18px; }
figcaption { margin-bottom: 10px; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--quiet); font-size: 13px; }
svg text.head { fill: var(--ink); }
svg .lane { fill: var(--lane); } svg .matmul { fill: var(--matmul); } svg .transfer { fill: var(--transfer); }
svg .saved { fill: none; stroke: var(--good); stroke-dasharray: 4 4; }
.diff { background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: auto; max-height: 82vh; }
.diff > * { min-width: max-content; }
.l { display: block; text-decoration: none; white-space: pre; padding-right: 14px; }
.l b { display: inline-block; width: 52px; padding-right: 10px; text-align: right; font-weight: normal; \
color: var(--quiet);
  font: 11.5px ui-monospace, "DejaVu Sans Mono", monospace; user-select: none; }
.l code::before { content: "  "; }
ins.l { background: var(--ins); } ins.l code::before { content: "+ "; color: var(--good); }
del.l { background: var(--del); } del.l code::before { content: "- "; color: var(--bad); }
.l:target, .l.here { outline: 2px solid var(--accent); outline-offset: -2px; }
.diff summary { cursor: pointer; color: var(--quiet); background: var(--lane); padding: 2px 14px; }
.script-only, .hidden { display: none; }
.scripted .script-only { display: flex; gap: 8px; }
"""

SCRIPT = """
document.documentElement.classList.add('scripted');
const rows = [...document.querySelectorAll('.sites details')];
const box = document.getElementById('filter');
if (box) {
  const apply = () => {
    const wanted = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
    let shown = 0;
    for (const row of rows) {
      const hit = wanted.every(word => row.textContent.toLowerCase().includes(word));
      row.classList.toggle('hidden', !hit);
      shown += hit;
    }
    document.getElementById('shown').textContent = shown === rows.length ? '' : shown + ' of ' + rows.length + ' rows';
  };
  box.addEventListener('input', apply);
  document.getElementById('all').addEventListener('click', event => {
    const open = rows.some(row => !row.open);
    rows.forEach(row => { row.open = open; });
    event.target.textContent = open ? 'close all' : 'open all';
  });
}
const reveal = target => {
  for (let at = target; at; at = at.parentElement) if (at.tagName === 'DETAILS') at.open = true;
  target.scrollIntoView({block: 'center'});
};
document.addEventListener('click', event => {
  const link = event.target.closest('a[href^="#line-"]');
  const target = link && document.getElementById(link.getAttribute('href').slice(1));
  if (target) reveal(target);
});
const changes = [...document.querySelectorAll('[data-change]')];
let at = -1;
for (const button of document.querySelectorAll('[data-step]')) button.addEventListener('click', () => {
  if (!changes.length) return;
  if (changes[at]) changes[at].classList.remove('here');
  at = at < 0 ? (button.dataset.step > 0 ? 0 : changes.length - 1) \
: (at + Number(button.dataset.step) + changes.length) % changes.length;
  changes[at].classList.add('here');
  reveal(changes[at]);
});
"""


# Forbids the page to load anything, whatever a name in a graph holds.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, body: str) -> str:
    """A whole document. ``title`` is plain text, ``body`` is HTML."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
