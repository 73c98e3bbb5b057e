"""When gradients are ready: predicted from the graph against measured, for several networks.

    python benchmarks/timeline.py [--steps 15]

For each network: rank correlation of the predicted and the measured order, and the mean error of
the ready times as a part of the step, with the device's rates fitted to this network (`own`) and
fitted to all the others (`others`: the network is then held out). One core, float32.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent
DEMO = ["simulate.scan=[12,12]", "simulate.detector=[31,31]"]
DIFFRACTION = [
    *("network.layout=diffraction", "network.layers=[2,3]", "train.batch=2"),
    *("simulate.scan=[8,8]", "simulate.detector=[32,32]", "simulate.scan_step=1.0"),
]
DEEP = [*DEMO, "network.layers=[6,8]", "network.bottleneck_layers=8", "network.growth=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="measured steps; medians count")
    options = parser.parse_args()
    import keras
    import tensorflow as tf
    from scipy.stats import kendalltau, spearmanr

    from stemdl import files
    from stemdl.reduction import timeline

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    networks = {
        "scan layout": ours(DEMO),
        "diffraction layout": ours(DIFFRACTION),
        "deep scan layout": ours(DEEP),
        "MobileNetV2": keras.applications.MobileNetV2(SHAPE, weights=None, classes=10),
        "DenseNet121": keras.applications.DenseNet121(weights=None, classes=10, input_shape=SHAPE),
    }
    cases = {}
    for name, network in networks.items():
        model, batch = (
            (network, image_batch(network)) if isinstance(network, keras.Model) else network
        )
        gradients = timeline.of_model(model, lambda y, p: tf.reduce_mean(tf.abs(p - y)))
        signature = [tf.TensorSpec(each.shape, each.dtype) for each in batch]
        operations, outputs = timeline.trace(gradients, signature)
        measured = timeline.measure(gradients, batch, steps=options.steps)
        cases[name] = (operations, outputs, measured.ready)
    rows = []
    for name, (operations, outputs, ready) in cases.items():
        row = {"network": name, "gradients": len(ready), "measured_s": max(ready)}
        others = [case for other, case in cases.items() if other != name]
        for basis, known in (("own", [cases[name]]), ("others", others)):
            predicted = timeline.predict(operations, outputs, timeline.fit_rates(*known))
            difference = np.abs(np.subtract(predicted.ready, ready)).mean()
            row[f"{basis}_error"] = float(difference / max(ready))
            row[f"{basis}_length"] = max(predicted.ready) / max(ready)
            row["spearman"] = float(spearmanr(predicted.ready, ready).statistic)
            row["kendall"] = float(kendalltau(predicted.ready, ready).statistic)
        rows.append(row)
        print(
            f"{name:<20}{row['gradients']:>4} gradients, {row['measured_s'] * 1e3:6.1f} ms: "
            f"order: Spearman {row['spearman']:.3f}, Kendall {row['kendall']:.3f}; "
            f"error of times: own rates {row['own_error']:.1%}, others' {row['others_error']:.1%} "
            f"(length {row['others_length']:.2f})"
        )
    target = ROOT / "build/benchmarks/timeline.json"
    files.write_json(target, "stemdl.benchmark/1", {"networks": rows})
    print(f"wrote {target}")


SHAPE = (64, 64, 3)


def ours(overrides: list[str]):
    """(model, batch) of the demo's network with other settings."""
    import tensorflow as tf

    from stemdl import config
    from stemdl.network import layouts
    from stemdl.reduction import expected

    experiment = config.load(ROOT / "configs/demo.yaml", ["data.dir=none", *overrides])
    shapes = expected.shapes(experiment)
    batch = [tf.random.normal((experiment.train.batch, *shape)) for shape in shapes]
    return layouts.build(experiment.network, *shapes, seed=0), batch


def image_batch(model):
    import tensorflow as tf

    return [tf.random.normal((2, *SHAPE)), tf.zeros((2, *model.output_shape[1:]))]


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
