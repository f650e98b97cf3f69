/* Gradients and activations by depth: curves over the layers in the order in which they run. */
(function (Holter) {
  'use strict';

  const { el, named, sentence } = Holter;

  /** A section with the flows whose ids match. */
  function flow(matching) {
    const wanted = (view) => view.flow.filter((one) => matching(one.id) && one.layers.length).map(comparable);
    return {
      signature: (view) => JSON.stringify(wanted(view)),
      build: (view) => wanted(view).map((one) => drawn(one)),
    };
  }

  /** A curve without a single point has no place in the legend: it is told in words. */
  function drawn(one) {
    const log = one.log && one.curves.some((curve) => curve.values.some((value) => value > 0));
    const known = (curve) => curve.values.some((value) => (log ? value > 0 : value !== null));
    const name = (curve) => `${curve.name}, step ${Holter.whole(curve.step)}`;
    const why = (curve) => (curve.values.every((value) => value === null) ? 'nothing finite' : 'zero throughout');
    const curves = one.curves.filter(known),
      missing = one.curves.filter((curve) => !known(curve)).map((curve) => `${named(name(curve), 60)}: ${why(curve)}`);
    const title = sentence(one.title),
      node = Holter.sections.plot(240, one.id);
    if (curves.length) depth(node, { ...one, curves, log, label: named(one.title, 60) });
    const figure = Holter.sections.figure(title, curves.length ? node : '', curves.map(name));
    if (missing.length) figure.append(el('p', { class: 'muted small' }, `Not drawn: ${missing.join('; ')}.`));
    return figure;
  }

  /** Biases and norms differ in size for reasons of their own: a flow is that of the other weights. */
  function comparable(one) {
    const matches = (name) => name.endsWith('.weight') && !/norm|(^|[._])(ln|bn)/i.test(name);
    const places = one.layers.map((_, place) => place).filter((place) => matches(one.layers[place]));
    if (places.length < 2 || places.length === one.layers.length) return one;
    const curves = one.curves.map((curve) => ({ ...curve, values: places.map((place) => curve.values[place]) }));
    return {
      ...one,
      title: `${one.title}, of weights without norms and biases`,
      layers: places.map((place) => one.layers[place]),
      curves,
    };
  }

  /** Curves over the depth of the model, input at the left. */
  function depth(node, { layers, curves, log, label = '' }) {
    node.setAttribute('role', 'img');
    node.setAttribute('aria-label', `${label}, by depth, of ${layers.length} layers`);
    return Holter.charts.show(node, (width) => {
      const theme = Holter.charts.colors();
      const most = Math.max(2, Math.floor(width / 110)),
        every = Math.ceil(layers.length / most);
      const ticks = layers.map((_, place) => place).filter((place) => place % every === 0);
      return {
        data: curves.map((curve, place) => ({
          type: 'scatter',
          mode: 'lines+markers',
          x: layers.map((_, index) => index),
          y: log ? curve.values.map((value) => (value > 0 ? value : null)) : curve.values,
          connectgaps: !log, // zero has no place on a logarithmic axis
          name: Holter.plotText(`${curve.name}, step ${Holter.whole(curve.step)}`, 40),
          line: { width: 1, color: Holter.theme.transparent(theme.series[place % 6], 0.4) },
          marker: { size: 6, color: theme.series[place % 6], symbol: ['circle', 'diamond', 'square'][place % 3] },
          text: layers.map((layer) => Holter.plotText(layer)),
          hovertemplate: '%{text}<br>%{y:.3~g}',
        })),
        layout: {
          margin: { l: 52, r: 16, t: 8, b: 40 },
          hovermode: 'closest',
          xaxis: {
            tickvals: ticks,
            ticktext: ticks.map((place) => Holter.plotText(layers[place], 16)),
            tickangle: 0,
            range: [-0.5, layers.length - 0.5],
          },
          yaxis: Holter.charts.vertical(
            log,
            curves.map((curve) => curve.values),
          ),
        },
      };
    });
  }

  Holter.flow = flow;
})((window.Holter = window.Holter || {}));
