// The page: pictures in, verdicts out.
import * as ort from "./node_modules/onnxruntime-web/dist/ort.wasm.min.mjs";
import { judge } from "./judge.mjs";

ort.env.wasm.wasmPaths = new URL("./node_modules/onnxruntime-web/dist/", import.meta.url).href;
ort.env.wasm.numThreads = 1; // more need a server that sends the headers of cross-origin isolation

const status = document.querySelector("#status");
const list = document.querySelector("#verdicts");

/** A picture as the network takes it: (channels, height, width), values from 0 to 1; a single channel is grey. */
async function pixels(blob, [channels, height, width]) {
  const bitmap = await createImageBitmap(blob, { resizeWidth: width, resizeHeight: height, resizeQuality: "high" });
  const context = new OffscreenCanvas(width, height).getContext("2d");
  context.drawImage(bitmap, 0, 0);
  const rgba = context.getImageData(0, 0, width, height).data;
  const values = new Float32Array(channels * height * width);
  for (let i = 0; i < height * width; i++) {
    const [red, green, blue] = rgba.subarray(4 * i, 4 * i + 3);
    const colours = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    colours.forEach((colour, channel) => (values[channel * height * width + i] = colour / 255));
  }
  return values;
}

/** A picture with its verdict. */
async function card(session, shape, name, blob) {
  const [verdict] = await judge(ort, session, await pixels(blob, shape), shape);
  const item = document.createElement("li");
  const parts = ["img", "b", "small", "small", "small"].map((tag) => item.appendChild(document.createElement(tag)));
  item.className = verdict.isOod ? "foreign" : "known";
  parts[0].src = URL.createObjectURL(blob);
  parts[0].alt = name;
  parts[1].textContent = verdict.isOod ? "refused" : `a ${verdict.label}`;
  parts[2].textContent = `p-value ${verdict.pValue.toPrecision(2)}`;
  parts[3].textContent = `score ${verdict.score.toPrecision(3)}`;
  parts[4].textContent = name;
  return item;
}

/** A file beside the page, not one that the browser has kept. */
async function load(name) {
  const response = await fetch(name, { cache: "no-cache" });
  if (!response.ok) throw new Error(`${name}: ${response.status} ${response.statusText}`);
  return response;
}

async function main() {
  const session = await ort.InferenceSession.create(await (await load("guard.onnx")).arrayBuffer());
  const shape = session.inputMetadata[0].shape.slice(1);
  status.textContent = `Ready: pictures are resized to ${shape[2]} × ${shape[1]} pixels.`;
  document.querySelector("#files").addEventListener("change", async (event) => {
    for (const file of event.target.files) {
      try {
        list.prepend(await card(session, shape, file.name, file));
      } catch (error) {
        status.textContent = `${file.name} cannot be read: ${error.message}`;
      }
    }
  });
  const samples = await fetch("samples/names.json", { cache: "no-cache" });
  for (const name of samples.ok ? await samples.json() : []) {
    list.append(await card(session, shape, name, await (await load(`samples/${name}`)).blob()));
  }
}

main().catch((error) => {
  status.setAttribute("role", "alert");
  status.textContent = `${error.message}. Run make_guard.py and npm ci first.`;
});
