"""The report's style: light or dark as the reader has it, and one column on a phone."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --soft: #5c5c66; --page: #ffffff; --card: #f4f4f7; --line: #d9d9e0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e9e9ee; --soft: #a9a9b5; --page: #17171b; --card: #222228; --line: #3a3a44; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p, li { max-width: 46rem; } .soft { color: var(--soft); } .warning { font-weight: bold; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
figure { flex: 1 1 22rem; min-width: 0; margin: 0; }
figure img { width: 100%;
  height: auto; display: block; background: #fff; padding: .4rem; border: 1px solid var(--line); border-radius: .4rem; }
figcaption { color: var(--soft); font-size: .85rem; padding: .3rem .1rem; }
.numbers { display: flex; flex-wrap: wrap; gap: .6rem; padding: 0; list-style: none; }
.numbers li { flex: 1 1 9rem; background: var(--card); border-radius: .5rem; padding: .6rem .8rem; }
.numbers b { display: block; font-size: 1.35rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0;
  text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: normal; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { display: flex; height: 1.6rem; border: 1px solid var(--line); border-radius: .3rem; overflow: hidden; max-width: 46rem; }
.bar span { min-width: 0; } .selection { background: #f0a02f; } .attention { background: #1f5fa8; }
.rest { background: repeating-linear-gradient(45deg, #c9c9d2 0 6px, #b4b4bf 6px 8px); }
.key { display: inline-block; width: .9rem; height: .9rem; border-radius: .2rem; vertical-align: -.1rem; margin-right: .35rem; }
pre { background: var(--card); padding: .7rem; border-radius: .4rem; white-space: pre-wrap; font-size: .85rem; }
"""
