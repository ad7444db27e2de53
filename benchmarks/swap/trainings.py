"""The trainings of both halves, with the settings that public scripts of their kind have."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from benchmarks.swap import control, generative, supervised
from benchmarks.swap.training import Training, with_weight_norm

CHOOSE = [
    Training("mlp", "choose", supervised.digits_mlp, "SGD", {"lr": 0.01}, "small", 400),
    Training("regression-table", "choose", supervised.teacher, "Adam", {"lr": 1e-4}, "small", 400),
    Training("vae", "choose", generative.vae, "Adam", {"lr": 1e-3}, "usual", 200),
    Training(
        "gpt-characters", "choose", supervised.character_gpt, "AdamW", {"lr": 1e-3, "betas": (0.9, 0.95)}, "usual", 250,
        schedule="cosine", warmup=20, clip=1.0,
    ),
    Training("lstm-words", "choose", supervised.word_lstm, "Adam", {"lr": 2e-3}, "usual", 200, clip=1.0),
    Training(
        "conv-batchnorm", "choose", supervised.batchnorm_net, "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, "usual", 300, schedule="cosine",
    ),
    Training(
        "conv-plain", "choose", supervised.plain_convolutions, "SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True},
        "edge", 300,
    ),
    Training("unet-diffusion", "choose", generative.unet_diffusion, "AdamW", {"lr": 1e-3}, "usual", 200),
    Training("flow-moons", "choose", generative.flow_of_moons, "Adam", {"lr": 1e-3}, "usual", 250, of_drop=True),
    Training(
        "encoder-rows", "choose", supervised.encoder, "Lamb", {"lr": 0.01, "weight_decay": 0.01}, "usual", 300,
        warmup=20,
    ),
    Training(
        "actor-critic", "choose", control.actor_critic, "Adam", {"lr": 1e-3}, "usual", 300, clip=0.5, of_drop=True,
    ),
    Training("graph", "choose", supervised.graph_net, "Adam", {"lr": 0.01, "weight_decay": 5e-4}, "usual", 200),
    Training(
        "mixer", "choose", supervised.mixer, "AdamW", {"lr": 1e-3, "weight_decay": 0.05}, "usual", 300,
        schedule="cosine", warmup=30,
    ),
    Training("two-tasks", "choose", supervised.two_tasks, "Adam", {"lr": 1e-3}, "usual", 300),
    Training("recommender", "choose", supervised.recommender, "Adam", {"lr": 2e-3}, "usual", 400),
    Training("mlp-tanh", "choose", supervised.deep_digits_mlp, "Adam", {"lr": 0.03}, "edge", 300),
]  # fmt: skip

JUDGE = [
    Training(
        "mlp-tanh-momentum", "judge", supervised.deep_digits_mlp, "SGD", {"lr": 0.5, "momentum": 0.9}, "edge", 400
    ),
    Training("regression-friedman", "judge", supervised.friedman, "SGD", {"lr": 0.05}, "usual", 400),
    Training("autoencoder", "judge", generative.autoencoder, "Adam", {"lr": 1e-3}, "usual", 300),
    Training(
        "gpt-adder", "judge", supervised.adder_gpt, "AdamW", {"lr": 1e-3, "betas": (0.9, 0.95)}, "usual", 400,
        schedule="cosine", warmup=40, clip=1.0,
    ),
    Training("lstm-characters", "judge", supervised.character_lstm, "SGD", {"lr": 5.0}, "usual", 200, clip=0.25),
    Training(
        "resnet", "judge", supervised.resnet, "SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}, "usual", 250,
        schedule="cosine", warmup=25,
    ),
    Training("conv-dropout", "judge", supervised.convolutions_with_dropout, "Adam", {"lr": 1e-4}, "small", 300),
    Training("point-diffusion", "judge", generative.point_diffusion, "AdamW", {"lr": 1e-3}, "usual", 400, clip=1.0),
    Training("flow-sensors", "judge", generative.flow_of_sensors, "Adam", {"lr": 0.01}, "edge", 250, of_drop=True),
    Training("contrastive", "judge", generative.contrastive, "Lamb", {"lr": 0.01, "weight_decay": 1e-4}, "usual", 250),
    Training(
        "deep-q", "judge", control.deep_q, "Adam", {"lr": 1e-3}, "usual", 400, of_drop=True,
    ),
    Training("heat-equation", "judge", control.heat_equation, "Adam", {"lr": 1e-3}, "usual", 300),
    Training("vit", "judge", supervised.vision_transformer, "AdamW", {"lr": 1e-3}, "usual", 250, warmup=50),
    Training(
        "siamese", "judge", generative.siamese, "SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}, "usual", 300
    ),
    Training(
        "gan", "judge", generative.gan, "Adam", {"lr": 1e-3, "betas": (0.5, 0.999)}, "usual", 400, of_drop=True,
    ),
    Training("word-bag", "judge", supervised.word_bag, "AdamW", {"lr": 1e-3}, "usual", 400),
]  # fmt: skip

TRAININGS: dict[str, Training] = {training.name: training for training in CHOOSE + JUDGE}

LAMB_RATES = {"small": 0.003, "usual": 0.01, "edge": 0.03}  # for networks as small as these
_CONTROL = ("actor-critic", "deep-q", "gan")  # games and control, whose losses say little
# All that another class trains, once more by LAMB.
UNDER_LAMB: dict[str, Training] = {
    (name := f"{training.name}-{rate}"): replace(
        training,
        name=name,
        optimizer="Lamb",
        options={"lr": lr, "weight_decay": training.options.get("weight_decay", 0.0)},
        rate=rate,
    )
    for training in CHOOSE + JUDGE
    if training.optimizer != "Lamb" and training.name not in _CONTROL
    for rate, lr in LAMB_RATES.items()
}
# All with weight norm; but for the GPT with a tied head, whose one weight would become two.
WITH_WEIGHT_NORM: dict[str, Training] = {
    (name := f"{training.name}-normed"): replace(training, name=name, make=partial(with_weight_norm, training.make))
    for training in CHOOSE + JUDGE
    if training.name not in (*_CONTROL, "gpt-adder")
}
HALVES = {
    "choose": "the half that defaults are chosen by",
    "judge": "the half that is only looked at in the end",
}
