/* Runs side by side: what became of the first in the others, in sentences, curves and a map of where they part. */
(function (Holter) {
  'use strict';

  const { el, icon, named, shorten, number, whole, words, sentence } = Holter;
  const S = Holter.sections;
  const KINDS = {
    worked: 'good', better: 'good', same: 'good', 'no difference': 'unknown', unknown: 'unknown',
    'worked in part': 'warning', worse: 'critical', 'did not work': 'critical',
  };
  // Blue: smaller than in the reference; orange: larger.
  const scale = (isDark) => (isDark
    ? [[0, '#8fbcff'], [0.25, '#3f6fb5'], [0.5, '#262a31'], [0.75, '#b5692a'], [1, '#ffab66']]
    : [[0, '#0b4f9e'], [0.25, '#6ba3e0'], [0.5, '#f3f3f1'], [0.75, '#f0a860'], [1, '#b34a00']]);
  const MOST_ROWS = 60;

  const said = (texts) => el('ul', { class: 'plain' }, texts.map((text) => el('li', {}, shorten(text, 500))));
  const block = (title, ...body) => el('section', { class: 'block' }, el('h2', {}, title), el('div', { class: 'body' }, body));

  function mark(state) {
    const kind = KINDS[state] || 'unknown';
    return el('p', { class: `mark ${kind}` }, icon(kind), sentence(state));
  }

  /** The runs with the colours that they have in every chart. */
  function legend(view, links) {
    return el('ul', { class: 'sides' }, view.runs.map((run, place) => {
      const swatch = el('i', { class: 'key' });
      swatch.style.background = `var(--c${(place % 6) + 1})`;
      const name = links[place] ? el('a', { href: links[place] }, named(run.name, 80)) : named(run.name, 80);
      return el('li', {}, swatch, name, el('span', { class: 'muted' }, `${place ? '' : 'reference, '}${named(run.state, 24)}, ${whole(run.steps)} steps`));
    }));
  }

  function findings(title, list, none) {
    return el('div', { class: 'card' }, el('h3', {}, title), list.length ? el('ul', { class: 'changes' }, list.map((finding) => el('li', {},
      icon(finding.severity === 'critical' ? 'critical' : finding.severity === 'warning' ? 'warning' : 'unknown'),
      el('span', {}, words(finding.title || finding.cause), finding.layer ? ` in ${named(finding.layer, 60)}` : '', el('span', { class: 'muted' }, ` since step ${whole(finding.since)}`)))))
      : el('p', { class: 'muted small' }, none));
  }

  function setup(differences) {
    const cells = (one) => [words(one.what), named(one.reference ?? '–', 160), named(one.other ?? '–', 160), typeof one.since === 'number' ? `step ${whole(one.since)}` : ''];
    return el('div', { class: 'card wide' }, el('table', { class: 'settings' },
      el('thead', {}, el('tr', {}, ['what', 'reference', 'here', 'since'].map((name) => el('th', { scope: 'col' }, name)))),
      el('tbody', {}, differences.slice(0, MOST_ROWS).map((one) => {
        const [what, ...rest] = cells(one);
        return el('tr', {}, el('th', { scope: 'row' }, what), rest.map((text) => el('td', {}, text)));
      }))));
  }

  function ratioMap(map) {
    const height = Math.min(560, Math.max(140, map.layers.length * 15 + 50));
    const plot = S.plot(height, 'ratios');
    const table = Holter.matrix(map.values);
    const rows = map.layers.map((_, place) => Array.from(table.row(place), (value) => (Number.isFinite(value) ? value : null)));
    let most = 0.1;
    for (const row of rows) for (const value of row) most = Math.max(most, Math.abs(value || 0));
    most = Math.min(most, 3);
    plot.setAttribute('role', 'img');
    plot.setAttribute('aria-label', `${named(map.title, 80)}: ${map.layers.length} layers, ${map.steps.length} steps`);
    Holter.charts.show(plot, (width) => {
      const every = Math.max(1, Math.ceil(map.layers.length / (height / 15))), room = Math.min(180, width / 3);
      const ticks = map.layers.map((_, place) => place).filter((place) => place % every === 0);
      return {
        data: [{ type: 'heatmap', x: map.places, y: rows.map((_, place) => place), z: rows, colorscale: scale(Holter.charts.isDark()), zmin: -most, zmax: most, showscale: false, ygap: height / rows.length > 15 ? 1 : Holter.charts.NO_GAP,
          text: map.layers.map((layer) => map.steps.map(() => Holter.plotText(layer))), hovertemplate: '%{text}<br>step %{x}: 10^%{z:.2f}<extra></extra>' }],
        layout: { hovermode: 'closest', margin: { l: room, r: 12, t: 8, b: 26 },
          yaxis: { autorange: 'reversed', showgrid: false, tickvals: ticks, ticktext: ticks.map((place) => Holter.plotText(map.layers[place], Math.floor(room / 7))) } },
      };
    }, { linked: true });
    return el('figure', { class: 'chart' }, el('figcaption', {}, el('b', {}, 'Gradient norm of each layer over the reference’s'),
      el('span', {}, `blue: smaller, down to ${number(10 ** -most)}×; orange: larger, up to ${number(10 ** most)}×`),
      rows.some((row) => row.includes(null)) ? el('span', {}, 'blank: zero, not finite or not measured in one of the two') : ''), plot);
  }

  /** What got worse, where the sentence of the verdict does not say it all already. */
  function regressions({ regressions: found, sentence: told }) {
    if (found.every((text) => told.includes(text))) return '';
    return el('p', { class: 'note' }, icon('warning'), el('span', {}, `Worse than before: ${found.map((text) => shorten(text, 300)).join('; ')}.`));
  }

  function headline(one, isOnly) {
    const changed = one.went.length + one.came.length + one.stayed.length;
    return el('article', { class: 'pair' },
      el('section', { class: 'verdict', 'aria-label': `Verdict on ${named(one.name, 60)}` },
        isOnly ? '' : el('p', { class: 'muted' }, `${named(one.name, 80)} against ${named(one.reference, 80)}`),
        mark(one.verdict.state), el('h2', { class: isOnly ? 'sentence' : 'sentence smaller' }, shorten(one.verdict.sentence, 600))),
      regressions(one.verdict),
      changed ? el('div', { class: 'columns' }, findings('Gone', one.went, 'nothing'), findings('New', one.came, 'nothing'),
        findings('Still there', one.stayed.map((two) => two.now), 'nothing')) : '');
  }

  function details(one, isOnly) {
    const of = isOnly ? '' : `, ${named(one.name, 60)}`;
    return [
      one.parting.length ? block(`Where they part${of}`, said(one.parting), one.map && one.map.layers.length ? ratioMap(one.map) : '') : '',
      block(`What is set up differently${of}`, one.setup.length ? setup(one.setup) : el('p', { class: 'muted' }, 'Nothing that was recorded.')),
      one.evidence.length ? block(`Gradients and losses at the end${of}`, said(one.evidence)) : '',
    ];
  }

  function curves(view) {
    return block('Side by side', ...view.curves.map((curve) => {
      const plot = S.plot(curve.name === 'loss' ? 260 : 180, curve.name);
      const series = curve.runs.map((run) => ({
        name: run.name, steps: run.places, values: run.values, color: null, place: view.runs.findIndex((side) => side.name === run.name),
      }));
      const positive = series.every((run) => run.values.every((value) => value === null || value > 0));
      const theme = Holter.charts.colors();
      Holter.charts.lines(plot, { series: series.map((run) => ({ ...run, color: theme.series[run.place % 6], dash: run.place ? 'solid' : 'dot' })), log: curve.log && positive });
      return S.figure(sentence(curve.title), plot);
    }));
  }

  function table(view) {
    const heads = ['', ...view.runs.map((run) => named(run.name, 40)), view.runs.length === 2 ? 'change' : ''];
    return block('In numbers', el('div', { class: 'card wide' }, el('table', { class: 'numbers' },
      el('thead', {}, el('tr', {}, heads.map((name) => el('th', { scope: 'col' }, name)))),
      el('tbody', {}, view.table.map((row) => el('tr', {}, el('th', { scope: 'row' }, words(row.name)), row.texts.map((text) => el('td', {}, named(text, 120))),
        el('td', { class: 'muted' }, view.runs.length === 2 ? shorten(row.change, 40) : '')))))));
  }

  const asQuery = (runs) => runs.map((run) => `run=${encodeURIComponent(run.toWellFormed())}`).join('&');

  /** The other way round: which run is the reference decides whether a fix worked or something got worse. */
  function swap(asked) {
    const words = asked.length === 2 ? 'Swap the two' : 'Reverse the order';
    return el('p', { class: 'swap' }, el('a', { class: 'link', href: `/compare?${asQuery(asked.toReversed())}` }, words),
      el('span', { class: 'muted' }, 'The first is the reference, which the others are held against.'));
  }

  /** Draws a comparison; `asked` are the runs in the address of a page that a dashboard serves: a file cannot follow. */
  Holter.showComparison = function showComparison(view, asked = []) {
    const links = asked.map((run) => `/run/${encodeURIComponent(run.toWellFormed())}`);
    const steps = view.curves.flatMap((curve) => curve.runs.flatMap((run) => run.places.filter((place) => place !== null)));
    Holter.charts.setExtent(...(steps.length ? Holter.charts.extremes(steps) : [0, 1]));
    const notes = view.runs.flatMap((run) => run.notes.map((note) => `${named(run.name, 60)}: ${note}`));
    const names = view.runs.map((run) => named(run.name, 40));
    document.title = `${names.slice(0, 3).join(', ')} · Holter`;
    const button = Holter.frame ? '' : Holter.theme.button(); // in the dashboard the bar has one
    document.getElementById('page').replaceChildren(el('main', { class: 'list comparison' }, button,
      el('h1', {}, view.runs.length === 2 ? `${names[1]} against ${names[0]}` : `${view.runs.length} runs side by side`), legend(view, links),
      asked.length ? swap(asked) : '',
      notes.map((note) => el('p', { class: 'note' }, icon('warning'), el('span', {}, shorten(note, 400)))),
      view.pairs.map((one) => headline(one, view.pairs.length === 1)), curves(view), table(view),
      view.pairs.flatMap((one) => details(one, view.pairs.length === 1))));
  };

  async function fetched() {
    const asked = new URLSearchParams(window.location.search).getAll('run');
    const page = document.getElementById('page');
    const tell = (text) => page.replaceChildren(el('main', { class: 'list' }, el('h1', {}, 'Runs side by side'), el('p', { class: 'muted', role: 'status' }, text)));
    Holter.frame.bar(el('a', { class: 'back', href: '/' }, '← All runs'), Holter.theme.button());
    tell('Reading and comparing the runs …');
    try {
      const { json } = await Holter.frame.ask(`/api/compare?${asQuery(asked)}`);
      Holter.showComparison(json, asked);
    } catch (error) {
      if (!(error instanceof Holter.frame.Refused) && !(error instanceof TypeError)) throw error;
      tell(named(error.message, 300));
    }
  }

  const sent = document.getElementById('view');
  if (sent && sent.textContent.trim()) Holter.showComparison(JSON.parse(sent.textContent));
  else if (Holter.frame) fetched();
})((window.Holter = window.Holter || {}));
