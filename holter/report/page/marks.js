/* What is marked in charts over steps: where findings began, and where a checkpoint was gone on from. */
(function (Holter) {
  'use strict';

  const { el } = Holter;
  const [BLACK, WHITE] = ['#14161a', '#ffffff']; // together seen on every colour of a map, in both themes
  const MOST_NAMED = 4;

  function trace(mode, x, y, look) {
    return { type: 'scatter', mode, hoverinfo: 'skip', x, y, ...look };
  }

  /** Lines through all rows of a strip chart. */
  function through(steps, rows, look) {
    const x = steps.flatMap((step) => [step, step, null]),
      y = steps.flatMap(() => [-0.5, rows - 0.5, null]);
    return trace('lines', x, y, { line: look });
  }

  /** The row of a finding: that of its layer, or of the first parameter of its module. */
  function rowOf(layer, map, places) {
    if (!layer) return -1;
    const exact = places.findIndex((place) => map.layers[place] === layer);
    if (exact >= 0) return exact;
    return places.findIndex(
      (place) => map.layers[place].startsWith(`${layer}.`) || layer.startsWith(`${map.layers[place]}.`),
    );
  }

  /** Findings of the training, with their numbers; what failed of Holter's own happened beside it. */
  function numbered(view) {
    return view.findings
      .map((finding, place) => ({ finding, number: place + 1 }))
      .filter(({ finding }) => finding.where !== 'monitor');
  }

  function sinces(view) {
    return [...new Set(numbered(view).map(({ finding }) => finding.since))].sort((a, b) => a - b);
  }

  /** The numbers of findings, those that begin side by side in one label. */
  function labels(view, steps) {
    const apart = 0.02 * (steps[steps.length - 1] - steps[0]);
    const found = [];
    for (const step of sinces(view)) {
      const numbers = numbered(view)
        .filter(({ finding }) => finding.since === step)
        .map(({ number }) => number);
      const last = found[found.length - 1];
      if (last && step - last.end < apart) Object.assign(last, { end: step, numbers: [...last.numbers, ...numbers] });
      else found.push({ step, end: step, numbers });
    }
    return found.map(({ step, numbers }) => ({
      ...{ x: step, y: 1, xref: 'x', yref: 'paper', yanchor: 'bottom', showarrow: false, font: { size: 12 } },
      text: numbers.slice(0, MOST_NAMED).join(' ') + (numbers.length > MOST_NAMED ? ' …' : ''),
    }));
  }

  /** Lines through all rows where findings began, and above them a mark in the row of each. */
  function findings(view, map, places) {
    const steps = sinces(view);
    const onRows = numbered(view)
      .map(({ finding }) => [finding.since, rowOf(finding.layer, map, places)])
      .filter(([, row]) => row >= 0);
    const lines = [
      through(steps, places.length, { color: WHITE, width: 4 }),
      through(steps, places.length, { color: BLACK, width: 1.5, dash: 'dash' }),
    ];
    const marks = trace(
      'markers',
      onRows.map(([step]) => step),
      onRows.map(([, row]) => row),
      { marker: { symbol: 'diamond', size: 13, color: WHITE, line: { color: BLACK, width: 2 } }, cliponaxis: false },
    );
    return { annotations: labels(view, map.steps), data: steps.length ? [...lines, marks] : [] };
  }

  // Resumes -------------------------------------------------------------------------------------------------------

  /** The steps with which training went on from a checkpoint. */
  function resumes(view) {
    return Array.isArray(view.run.resumed) ? view.run.resumed : [];
  }

  /** Thin and dotted, below the marks of findings. */
  function resumeTraces(view, rows) {
    const steps = resumes(view);
    if (!steps.length) return [];
    return [
      through(steps, rows, { color: WHITE, width: 3 }),
      through(steps, rows, { color: BLACK, width: 1.5, dash: 'dot' }),
    ];
  }

  function resumeShapes(view) {
    const line = { color: Holter.charts.colors().muted, width: 1, dash: 'dot' };
    return resumes(view).map((step) => ({ ...Holter.charts.sinceLine(step), line }));
  }

  /** What the dotted lines are, in words. */
  function resumeLegend(view) {
    const steps = resumes(view);
    if (!steps.length) return [];
    const said = steps.slice(0, MOST_NAMED).map((step) => Holter.whole(step));
    const more = steps.length > said.length ? ` and ${steps.length - said.length} more` : '';
    const words = `resumed from a checkpoint at step ${said.join(', ')}${more}`;
    return [el('span', { class: 'swatch resumes' }, el('i', { class: 'resumed' }), words)];
  }

  /** Before and after a section of charts. */
  function resumeWords(view) {
    const legend = resumeLegend(view);
    return [legend.length ? [el('p', { class: 'legend' }, legend)] : [], []];
  }

  Holter.marks = { findings, sinces, resumes, resumeTraces, resumeShapes, resumeLegend, resumeWords, WHITE, BLACK };
})((window.Holter = window.Holter || {}));
