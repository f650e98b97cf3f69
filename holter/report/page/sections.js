/* The parts of a run page that are words, tables and small charts. Each gives nodes for a view. */
(function (Holter) {
  'use strict';

  const { el, icon, named, number, whole, share, words, sentence } = Holter;
  const MARKS = { critical: 'critical', warning: 'warning', info: 'unknown' };
  const CHECKS = { passed: 'good', failed: 'warning', 'not observed': 'unknown' };

  function plot(height, key) {
    const node = el('div', { class: 'plot', 'data-chart': key });
    node.style.height = `${height}px`;
    return node;
  }

  /** A chart with its title and, where there are several lines, their names. */
  function figure(title, node, series = []) {
    const names =
      series.length > 1
        ? series.map((name, place) => {
            const mark = el('i', { class: 'key' });
            mark.style.background = `var(--c${(place % 6) + 1})`;
            return el('span', { class: 'swatch' }, mark, named(name, 40));
          })
        : [];
    return el('figure', { class: 'chart' }, el('figcaption', {}, el('b', {}, title), names), node);
  }

  // Top -----------------------------------------------------------------------------------------------------------

  function verdict(view) {
    const { state, severity, sentence: text } = view.verdict;
    const kind = state === 'healthy' ? 'good' : state === 'sick' ? MARKS[severity] || 'warning' : 'unknown';
    const word = state === 'sick' ? sentence(severity || 'sick') : state === 'healthy' ? 'Healthy' : 'Not known';
    const said = Holter.shorten(text, 600),
      end = said.indexOf('. ') + 1;
    const [head, rest] = end > 0 && end < 140 ? [said.slice(0, end), said.slice(end + 1)] : [said, ''];
    return [
      el('p', { class: `mark ${kind}` }, icon(kind), word),
      el('h2', { class: 'sentence' }, head, rest ? ' ' : '', rest ? el('span', { class: 'rest' }, rest) : ''),
    ];
  }

  function facts(run) {
    const known = [
      ['steps', run.steps ? `${whole(run.steps)}${run.segments > 1 ? `, in ${run.segments} segments` : ''}` : ''],
      [
        'model',
        run.model
          ? `${named(run.model, 60)}${run.parameters ? `, ${Holter.amount(run.parameters)} parameters` : ''}`
          : '',
      ],
      [
        'optimizer',
        [...(run.optimizers || []), ...(run.scheduler ? [run.scheduler] : [])]
          .map((name) => named(name, 40))
          .join(' · '),
      ],
      [
        'started',
        run.created ? new Date(run.created * 1000).toLocaleString([], { dateStyle: 'medium', timeStyle: 'short' }) : '',
      ],
      ['took', run.seconds ? Holter.duration(run.seconds) : ''],
      ['monitoring', typeof run.monitor_cost === 'number' ? `${share(run.monitor_cost)} of the time${run.has_no_budget ? ' (no budget set)' : ''}` : ''],
      [
        'versions',
        Object.entries(run.versions || {})
          .slice(0, 6)
          .map(([name, value]) => `${named(name, 20)} ${named(value, 24)}`)
          .join(' · '),
      ],
    ];
    return el(
      'dl',
      { class: 'facts' },
      known.filter(([, text]) => text).map(([name, text]) => el('div', {}, el('dt', {}, name), el('dd', {}, text))),
    );
  }

  function damage(view) {
    const run = view.run,
      said = [...view.notes];
    if (run.error) said.unshift(`The training ended with: ${Holter.shorten(run.error, 600)}`);
    if (run.dropped) said.push(`${whole(run.dropped)} records were dropped while it ran.`);
    return said.map((text) => el('p', { class: 'note' }, icon('warning'), el('span', {}, Holter.shorten(text, 800))));
  }

  // Findings ------------------------------------------------------------------------------------------------------

  function place(finding, open) {
    if (!finding.layer) return words(finding.where);
    return el(
      'button',
      {
        type: 'button',
        class: 'link',
        'data-key': `place ${Holter.shorten(finding.layer, 200)}`,
        onclick: (event) => open(finding.layer, event.currentTarget),
      },
      named(finding.layer),
    );
  }

  function evidence(found) {
    const lines = Object.entries(found || {});
    if (!lines.length) return '';
    const text = (value) =>
      typeof value === 'number'
        ? number(value)
        : typeof value === 'string'
          ? named(value, 300)
          : named(JSON.stringify(value), 300);
    return el(
      'table',
      { class: 'evidence' },
      el(
        'tbody',
        {},
        lines.map(([name, value]) => el('tr', {}, el('th', { scope: 'row' }, words(name)), el('td', {}, text(value)))),
      ),
    );
  }

  function card(finding, number_, open) {
    const charts = (finding.charts || []).map((chart) => ({ chart, node: plot(140) }));
    const node = el(
      'article',
      { class: `card finding ${finding.severity}`, id: `finding-${number_}` },
      el(
        'header',
        {},
        el('span', { class: 'badge', 'aria-hidden': 'true' }, number_),
        el('h3', {}, sentence(finding.title || finding.cause)),
        el('span', { class: `mark small ${MARKS[finding.severity]}` }, icon(MARKS[finding.severity]), finding.severity),
      ),
      el(
        'p',
        { class: 'meta' },
        el('span', {}, 'in ', place(finding, open)),
        el('span', {}, `since step ${whole(finding.since)}`),
        el('span', {}, `known at step ${whole(finding.step)}`),
        typeof finding.until === 'number' ? el('span', {}, `last seen at step ${whole(finding.until)}`) : '',
        el('span', {}, `confidence ${share(finding.confidence)}`),
      ),
      finding.advice ? el('p', { class: 'advice' }, Holter.shorten(finding.advice, 2000)) : '',
      el(
        'div',
        { class: 'proof' },
        el(
          'div',
          {},
          evidence(finding.evidence),
          finding.alternatives.length
            ? el('p', { class: 'muted small' }, `or: ${finding.alternatives.map((one) => words(one)).join(', ')}`)
            : '',
        ),
        charts.length
          ? el(
              'div',
              { class: 'charts' },
              charts.map(({ chart, node: at }) => figure(sentence(chart.title), at)),
            )
          : '',
      ),
    );
    const steps = charts
      .flatMap(({ chart }) => [chart.steps[0], chart.steps[chart.steps.length - 1]])
      .filter((step) => step !== undefined);
    const span = steps.length ? [Math.min(...steps), Math.max(...steps) + 0.5] : null;
    charts.forEach(({ chart, node: at }) =>
      Holter.charts.lines(at, {
        series: [{ name: chart.title, steps: chart.steps, values: chart.values }],
        log: chart.log && chart.values.every((value) => value === null || value > 0),
        marks: [finding.since],
        linked: false,
        span,
      }),
    );
    return node;
  }

  function findings(view, open) {
    return view.findings.map((finding, index) => card(finding, index + 1, open));
  }

  function events(view) {
    return [
      el(
        'ol',
        { class: 'timeline' },
        view.events.map((event) =>
          el(
            'li',
            {},
            el('span', { class: 'step' }, `step ${whole(event.step)}`),
            el('span', {}, Holter.shorten(event.what, 300)),
          ),
        ),
      ),
    ];
  }

  // Lists ---------------------------------------------------------------------------------------------------------

  function health(view) {
    const count = (state) => view.health.filter((check) => check.state === state).length;
    return [
      el(
        'p',
        { class: 'muted' },
        `${count('passed')} passed, ${count('failed')} failed, ${count('not observed')} not observed`,
      ),
      el(
        'ul',
        { class: 'checks' },
        view.health.map((check) =>
          el(
            'li',
            { class: CHECKS[check.state] },
            icon(CHECKS[check.state]),
            el('span', {}, el('b', {}, named(check.name)), el('span', { class: 'muted' }, named(check.text, 300))),
            el('span', { class: 'state' }, check.state),
          ),
        ),
      ),
    ];
  }

  function signs(view, open) {
    return [
      el(
        'ul',
        { class: 'plain' },
        view.signs.map((sign) =>
          el(
            'li',
            {},
            Holter.shorten(sign.text, 400),
            ' ',
            sign.layer
              ? el(
                  'button',
                  { type: 'button', class: 'link small', onclick: (event) => open(sign.layer, event.currentTarget) },
                  'look',
                )
              : '',
          ),
        ),
      ),
    ];
  }

  function thresholds(view) {
    return [
      el(
        'details',
        {},
        el('summary', {}, `${view.thresholds.length} limits, within which a series is judged by its own past`),
        el(
          'div',
          { class: 'wide' },
          el(
            'table',
            {},
            el(
              'thead',
              {},
              el(
                'tr',
                {},
                ['limit', 'value', 'means'].map((name) => el('th', { scope: 'col' }, name)),
              ),
            ),
            el(
              'tbody',
              {},
              view.thresholds.map((limit) =>
                el(
                  'tr',
                  {},
                  el('th', { scope: 'row' }, words(limit.name)),
                  el('td', {}, number(limit.value)),
                  el('td', {}, named(limit.means, 200)),
                ),
              ),
            ),
          ),
        ),
      ),
    ];
  }

  const bullets = (texts) => [
    el(
      'ul',
      { class: 'plain' },
      texts.map((text) => el('li', {}, Holter.shorten(text, 400))),
    ),
  ];

  // Machine -------------------------------------------------------------------------------------------------------

  /** The time of a step as one bar, its parts named beside it. */
  function stages(shares) {
    const parts = Object.entries(shares).filter(([, part]) => part > 0);
    if (!parts.length) return '';
    const color = (index) => `var(--c${(index % 6) + 1})`;
    return el(
      'div',
      { class: 'stages' },
      el(
        'div',
        { class: 'bar', 'aria-hidden': 'true' },
        parts.map(([, part], index) => {
          const piece = el('i', {});
          piece.style.width = `${100 * part}%`;
          piece.style.background = color(index);
          return piece;
        }),
      ),
      el(
        'p',
        { class: 'keys' },
        parts.map(([name, part], index) => {
          const mark = el('i', { class: 'key' });
          mark.style.background = color(index);
          return el('span', { class: 'swatch' }, mark, `${words(name)} ${share(part)}`);
        }),
      ),
    );
  }

  function figures(list) {
    return list.length
      ? el(
          'dl',
          { class: 'facts' },
          list.map((one) => el('div', {}, el('dt', {}, named(one.name, 60)), el('dd', {}, named(one.text, 120)))),
        )
      : '';
  }

  Holter.sections = {
    plot,
    figure,
    verdict,
    facts,
    damage,
    findings,
    events,
    health,
    signs,
    thresholds,
    bullets,
    stages,
    figures,
  };
})((window.Holter = window.Holter || {}));
