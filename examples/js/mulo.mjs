// A net of the desk task, Adam, and an exported learned optimizer, for onnxruntime-node and -web.
// Tensors are plain Float32Arrays in torch's layout: a weight is (out, in), row by row.

/** Initial weights, settings and batches from desk.json and desk.bin (see examples/desk.py). */
export function readDesk(about, buffer) {
  const arrays = {};
  let start = 0;
  for (const [name, shape, dtype] of about.arrays) {
    const size = shape.reduce((a, b) => a * b, 1);
    const data = dtype === "int32" ? new Int32Array(buffer, start, size) : new Float32Array(buffer, start, size);
    arrays[name] = { shape, data };
    start += 4 * size;
  }
  const { x, y, ...initial } = arrays;
  const params = {};
  for (const [name, p] of Object.entries(initial)) params[name] = { shape: p.shape, data: p.data.slice() };
  const [, size, inputs] = x.shape;
  const batch = (t) => ({
    x: x.data.subarray(t * size * inputs, (t + 1) * size * inputs),
    y: y.data.subarray(t * size, (t + 1) * size),
  });
  return { params, batch };
}

/** Mean cross-entropy of an MLP with ReLU, its logits times `multiplier`, and all gradients. */
export function lossAndGradients(params, { x, y }, multiplier) {
  const layers = Object.keys(params).filter((k) => k.endsWith("weight"));
  const size = y.length, inputs = [], grads = {};
  let z;
  for (const k of layers) {
    inputs.push(x);
    const [out, n] = params[k].shape, w = params[k].data, b = params[k.replace("weight", "bias")].data;
    z = new Float32Array(size * out);
    for (let i = 0; i < size; i++)
      for (let o = 0; o < out; o++) {
        let sum = b[o];
        for (let j = 0; j < n; j++) sum += x[i * n + j] * w[o * n + j];
        z[i * out + o] = sum;
      }
    x = z.map((v) => Math.max(v, 0));
  }
  const classes = z.length / size;
  let loss = 0, delta = new Float32Array(z.length);
  for (let i = 0; i < size; i++) {
    const row = Array.from(z.subarray(i * classes, (i + 1) * classes), (v) => v * multiplier);
    const top = Math.max(...row), total = row.reduce((s, v) => s + Math.exp(v - top), 0);
    loss += (Math.log(total) + top - row[y[i]]) / size;
    for (let c = 0; c < classes; c++)
      delta[i * classes + c] = ((Math.exp(row[c] - top) / total - (c === y[i])) * multiplier) / size;
  }
  for (const k of [...layers].reverse()) {
    const [out, n] = params[k].shape, w = params[k].data, a = inputs.pop();
    const gw = new Float32Array(out * n), gb = new Float32Array(out), back = new Float32Array(size * n);
    for (let i = 0; i < size; i++)
      for (let o = 0; o < out; o++) {
        const d = delta[i * out + o];
        gb[o] += d;
        for (let j = 0; j < n; j++) {
          gw[o * n + j] += d * a[i * n + j];
          back[i * n + j] += d * w[o * n + j];
        }
      }
    grads[k] = gw;
    grads[k.replace("weight", "bias")] = gb;
    delta = back.map((v, i) => (a[i] > 0 ? v : 0));
  }
  return { loss, grads };
}

/** A weight (out, in) transposed to (in, out), row by row. */
function transpose(data, [rows, columns]) {
  const result = new Float32Array(data.length);
  for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) result[j * rows + i] = data[i * columns + j];
  return result;
}

/** An exported optimizer: `about` is mulo_m.json, `open(kind)` makes a session. See README.md. */
export class MuLO {
  static async create(ort, open, about, params, roles) {
    const graphs = {};
    for (const kind of Object.keys(about.graphs)) graphs[kind] = await open(kind);
    return new MuLO(ort, graphs, about, params, roles);
  }

  constructor(ort, graphs, about, params, roles) {
    Object.assign(this, { ort, graphs, t: 0, tensors: {} });
    for (const [name, { shape }] of Object.entries(params)) {
      const [out, fanIn] = shape, isVector = shape.length === 1, tall = out >= fanIn;
      const sizes = isVector ? { b: 1, n: out } : { b: 1, e: 1, m: Math.min(out, fanIn), n: Math.max(out, fanIn) };
      const kind = isVector ? "vector" : "tensor", state = {};
      for (const x of about.graphs[kind].inputs.filter((x) => "first" in x)) {
        const dims = x.shape.map((d) => sizes[d] ?? d), size = dims.reduce((a, b) => a * b);
        state[x.name] = new ort.Tensor("float32", new Float32Array(size).fill(x.first), dims);
      }
      const { lo, mup } = about;
      let scale = (isVector ? 1 : fanIn) ** mup[roles[name]].update;
      if (lo.input_base && roles[name] === "input" && !isVector) scale *= Math.min(lo.input_base / fanIn, 4);
      this.tensors[name] = { kind, tall, state, scale, dims: Object.values(sizes) };
    }
  }

  async step(params, grads) {
    const tensor = (data, shape) => new this.ort.Tensor("float32", data, shape);
    for (const [name, { shape, data }] of Object.entries(params)) {
      const { kind, tall, state, scale, dims } = this.tensors[name];
      const turn = (x) => tensor(tall ? transpose(x, shape) : x, dims);
      const { new_p, ...rest } = await this.graphs[kind].run({
        p: turn(data),
        g: turn(grads[name]),
        ...state,
        t: tensor(Float32Array.of(this.t), [1]),
        scale: tensor(Float32Array.of(scale), [1]),
        decay: tensor(Float32Array.of(0), [1]),
      });
      params[name] = { shape, data: tall ? transpose(new_p.data, [...shape].reverse()) : new_p.data };
      this.tensors[name].state = Object.fromEntries(Object.entries(rest).map(([k, v]) => [k.slice(4), v]));
    }
    this.t += 1;
  }
}

/** Adam with its usual settings. */
export class Adam {
  constructor(params, lr) {
    Object.assign(this, { lr, t: 0, m: {}, v: {} });
    for (const [name, { data }] of Object.entries(params)) {
      this.m[name] = new Float32Array(data.length);
      this.v[name] = new Float32Array(data.length);
    }
  }

  step(params, grads) {
    this.t += 1;
    const [c1, c2] = [1 - 0.9 ** this.t, 1 - 0.999 ** this.t];
    for (const [name, { data }] of Object.entries(params)) {
      const g = grads[name], m = this.m[name], v = this.v[name];
      for (let i = 0; i < data.length; i++) {
        m[i] = 0.9 * m[i] + 0.1 * g[i];
        v[i] = 0.999 * v[i] + 0.001 * g[i] * g[i];
        data[i] -= (this.lr * m[i]) / c1 / (Math.sqrt(v[i] / c2) + 1e-8);
      }
    }
  }
}
