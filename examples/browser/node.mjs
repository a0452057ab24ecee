// node node.mjs guard.onnx inputs.f32 1,8,8: a line of JSON for each sample of a file of 32-bit floats.
import { readFile } from "node:fs/promises";
import { endianness } from "node:os";
import * as ort from "onnxruntime-node";
import { judge } from "./judge.mjs";

const [guard, inputs, axes] = process.argv.slice(2);
if (!axes || endianness() !== "LE") {
  console.error("usage: node node.mjs GUARD.onnx INPUTS.f32 CHANNELS,HEIGHT,WIDTH (32-bit floats, little-endian)");
  process.exit(2);
}
const shape = axes.split(",").map(Number);
const size = shape.reduce((product, axis) => product * axis, 1);
const bytes = await readFile(inputs);
if (bytes.length % (4 * size)) {
  console.error(`${inputs}: ${bytes.length} bytes are no whole number of samples of ${4 * size} bytes`);
  process.exit(2);
}
const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
const session = await ort.InferenceSession.create(guard);
const batch = 64 * size;
for (let start = 0; start < values.length; start += batch) {
  for (const verdict of await judge(ort, session, values.slice(start, start + batch), shape)) {
    console.log(JSON.stringify(verdict));
  }
}
