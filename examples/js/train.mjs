// Trains the desk net with an exported learned optimizer in Node.js:
//   cd examples/js && ONNXRUNTIME_NODE_INSTALL_CUDA=skip npm ci && node train.mjs ../../exported
import { existsSync } from "node:fs";
import { readFile } from "node:fs/promises";
import path from "node:path";
import * as ort from "onnxruntime-node";
import { MuLO, lossAndGradients, readDesk } from "./mulo.mjs";

const folder = process.argv[2] ?? "../../exported";
const files = ["desk.json", "desk.bin", "mulo_m.json", "mulo_m.tensor.onnx", "mulo_m.vector.onnx"];
const missing = files.find((file) => !existsSync(path.join(folder, file)));
if (missing) {
  console.error(`no ${folder}/${missing}: run python export.py mulo_m && python examples/desk.py`);
  process.exit(1);
}
const desk = JSON.parse(await readFile(path.join(folder, "desk.json")));
const about = JSON.parse(await readFile(path.join(folder, "mulo_m.json")));
const bytes = await readFile(path.join(folder, "desk.bin"));
const { params, batch } = readDesk(desk, bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
const options = { executionProviders: ["cpu"], intraOpNumThreads: 1 };
const open = (kind) => ort.InferenceSession.create(path.join(folder, `mulo_m.${kind}.onnx`), options);
const opt = await MuLO.create(ort, open, about, params, desk.roles);
for (let t = 0; t < desk.steps; t++) {
  const { loss, grads } = lossAndGradients(params, batch(t), desk.multiplier);
  await opt.step(params, grads);
  if (t % 50 === 0) console.log(`step ${t}: ${loss.toFixed(4)}`);
}
console.log("loss", lossAndGradients(params, batch(desk.steps), desk.multiplier).loss);
