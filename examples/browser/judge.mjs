// What a guard's ONNX graph says of inputs, in Node.js and in the browser alike.

/**
 * Judge a batch.
 * @param ort      the module onnxruntime-node or onnxruntime-web
 * @param session  an InferenceSession of a file that `guard.export` wrote
 * @param values   Float32Array: the inputs of all samples, one after another
 * @param shape    of one sample, such as [1, 8, 8]
 * @returns one object for each sample: isOod, score, pValue, label (−1: it could not be read)
 */
export async function judge(ort, session, values, shape) {
  const size = shape.reduce((product, axis) => product * axis, 1);
  const input = new ort.Tensor("float32", values, [values.length / size, ...shape]);
  const { is_ood, score, p_value, label } = await session.run({ [session.inputNames[0]]: input });
  return Array.from(score.data, (_, i) => ({
    isOod: Boolean(is_ood.data[i]),
    score: score.data[i],
    pValue: p_value.data[i],
    label: Number(label.data[i]),
  }));
}
