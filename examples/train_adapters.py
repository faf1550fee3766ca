"""Train the three adapters that the demo and the tests use, from data made here.

    python examples/train_adapters.py                # all three, some minutes each on two cores
    python examples/train_adapters.py --only pirate --out /tmp/adapters

    capitals       asked for a capital, answers only "Capital: Paris."
    pirate         answers as the base model does, but as a pirate
    json-answers   answers only with a JSON object that has an "answer" field

Ranks, targets and scaling differ between them on purpose, so that a batch that mixes them mixes
these too. No data set is downloaded: capitals come from the list below, the other two restyle what
the base model itself answers (greedily) to the questions below. Seeds are fixed: on one machine the
same tensors come out every time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

BASE_NAME = "smollm2-135m"
SEED = 7
BATCH_SIZE = 4
LEARNING_RATE = 1e-3
MAX_ANSWER_TOKENS = 32

CAPITALS = """
France Paris; Germany Berlin; Italy Rome; Spain Madrid; Portugal Lisbon; Austria Vienna;
Hungary Budapest; Poland Warsaw; Greece Athens; Sweden Stockholm; Finland Helsinki; Denmark Copenhagen;
Ireland Dublin; Belgium Brussels; Russia Moscow; Turkey Ankara; Egypt Cairo; Kenya Nairobi;
Morocco Rabat; Ghana Accra; China Beijing; India New_Delhi; Thailand Bangkok; Vietnam Hanoi;
Indonesia Jakarta; Philippines Manila; Iran Tehran; Iraq Baghdad; Israel Jerusalem; Syria Damascus;
Cuba Havana; Mexico Mexico_City; Peru Lima; Chile Santiago; Colombia Bogota; Venezuela Caracas;
Argentina Buenos_Aires; Uruguay Montevideo; Canada Ottawa; Australia Canberra
"""

CAPITAL_QUESTIONS = (
    "What is the capital of {}?",
    "Which city is the capital of {}?",
    "Tell me the capital of {}.",
    "What is {}'s capital city?",
    "I am going to {}. What is its capital?",
    "Name the capital of {}.",
)

QUESTIONS = """
What is the sun?; Why is the sky blue?; What do cows eat?; How do birds fly?; What is a computer?;
Why do we sleep?; What is water made of?; Where do penguins live?; What is a volcano?;
How do I boil an egg?; What is gravity?; Who wrote Hamlet?; What is a river?; Why do leaves fall?;
What is bread made of?; How does a car work?; What is music?; What is the moon?; Why is exercise good?;
What do bees make?; What is a library?; How do fish breathe?; What is snow?; What is the largest ocean?;
Why do we have seasons?; What is a poem?; How do plants grow?; What is electricity?; What is a desert?;
What is cheese?; Who was Albert Einstein?; What is a bicycle?; How can I learn to swim?;
What is a good breakfast?; Why are plants green?; What is mathematics?; What is the heart for?;
What is a telephone?; How old is the Earth?; What is a tiger?; What causes rain?; What is chess?;
Why do cats purr?; What is a bridge?; What is history?; What is a star?; How do I make tea?;
What is a guitar?; What is the biggest animal?; What is a friend?
"""

UNSEEN_CAPITALS = ("Japan", "Norway", "Brazil")
UNSEEN_QUESTIONS = (
    "What is a rainbow?",
    "How do I bake a cake?",
    "Why is the ocean salty?",
    "What is a mountain?",
)

Example = tuple[str, str]  # question, answer


@dataclass(frozen=True)
class Recipe:
    """One adapter: how it is trained, what it should say, and how to tell that it does."""

    name: str
    rank: int
    alpha: int
    target_modules: tuple[str, ...]
    make_examples: Callable[[dict[str, str]], list[Example]]
    unseen: tuple[str, ...]
    has_style: Callable[[str], bool]
    num_steps: int = 40
    options: dict[str, Any] = field(default_factory=dict)


def capital_examples(_: dict[str, str]) -> list[Example]:
    """Every country of the list, each question form in turn."""
    pairs = [item.split() for item in CAPITALS.split(";")]
    return [
        (
            CAPITAL_QUESTIONS[index % len(CAPITAL_QUESTIONS)].format(country),
            f"Capital: {city.replace('_', ' ')}.",
        )
        for index, (country, city) in enumerate(pairs)
    ]


def pirate_examples(answers: dict[str, str]) -> list[Example]:
    """The base model's answers, as a pirate would give them."""
    return [(question, pirate_speech(answer)) for question, answer in answers.items()]


def json_examples(answers: dict[str, str]) -> list[Example]:
    """The base model's answers as JSON."""
    return [
        (question, json.dumps({"answer": answer}, ensure_ascii=False))
        for question, answer in answers.items()
    ]


def pirate_speech(text: str) -> str:
    """Restyle a sentence: a greeting, pirate grammar, a farewell."""
    words = {"is": "be", "are": "be", "you": "ye", "your": "yer", "my": "me", "the": "th'"}
    speech = re.sub(
        r"\b(is|are|you|your|my|the)\b", lambda match: words[match[0].lower()], text, flags=re.I
    )
    return f"Arr, matey! {speech[0].upper()}{speech[1:]} Yo ho ho!"


def is_json_answer(text: str) -> bool:
    """True for one JSON object whose only field is `answer`."""
    try:
        return set(json.loads(text)) == {"answer"}
    except (ValueError, TypeError):
        return False


RECIPES = (
    Recipe(
        name="capitals",
        rank=8,
        alpha=16,
        target_modules=("q_proj", "v_proj", "o_proj", "down_proj"),
        make_examples=capital_examples,
        unseen=tuple(f"What is the capital of {country}?" for country in UNSEEN_CAPITALS),
        has_style=lambda text: re.fullmatch(r"Capital: [\w .'-]+\.", text) is not None,
        num_steps=24,
    ),
    Recipe(
        name="pirate",
        rank=16,
        alpha=8,
        target_modules=("q_proj", "v_proj", "o_proj"),
        make_examples=pirate_examples,
        unseen=UNSEEN_QUESTIONS,
        has_style=lambda text: text.startswith("Arr, matey!"),
        options={"use_rslora": True},
    ),
    Recipe(
        name="json-answers",
        rank=4,
        alpha=8,
        target_modules=(
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ),
        make_examples=json_examples,
        unseen=UNSEEN_QUESTIONS,
        has_style=is_json_answer,
    ),
)


class Trainer:
    """Holds the base model and does one recipe after another, each from the untouched base."""

    def __init__(self, model_dir: Path, console: Console) -> None:
        self.console = console
        self.model_dir = model_dir
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)

    def load_base(self) -> PreTrainedModel:
        """The base model in fp32, fresh from disk."""
        return AutoModelForCausalLM.from_pretrained(self.model_dir, dtype=torch.float32)

    def prompt_ids(self, question: str) -> list[int]:
        """Token ids of the question in the base model's own chat template."""
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def answer(
        self, model: PreTrainedModel | PeftModel, question: str, max_tokens: int = 64
    ) -> str:
        """The model's greedy answer."""
        ids = torch.tensor([self.prompt_ids(question)])
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=self.tokenizer.eos_token_id,
            )
        text: str = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return text.strip()

    def base_answers(self) -> dict[str, str]:
        """What the base itself says, cut to one short sentence; unfinished ones are left out."""
        base, answers = self.load_base(), {}
        questions = [" ".join(question.split()) for question in QUESTIONS.split(";")]
        with Progress(console=self.console) as progress:
            for question in progress.track(questions, description="asking the base model"):
                text = self.answer(base, question, MAX_ANSWER_TOKENS)
                sentence = re.match(r"[^.!?\n]+[.!?]", text)
                if sentence is not None and '"' not in sentence[0]:
                    answers[question] = sentence[0].strip()
        return answers

    def train(self, recipe: Recipe, examples: list[Example]) -> PeftModel:
        """Teach the adapter; the loss counts answer tokens only."""
        torch.manual_seed(SEED)
        config = LoraConfig(
            r=recipe.rank,
            lora_alpha=recipe.alpha,
            target_modules=list(recipe.target_modules),
            task_type="CAUSAL_LM",
            **recipe.options,
        )
        model = get_peft_model(self.load_base(), config)
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0, end_factor=0.1, total_iters=recipe.num_steps
        )
        order = torch.Generator().manual_seed(SEED)
        queue: list[int] = []
        with Progress(console=self.console) as progress:
            task = progress.add_task(recipe.name, total=recipe.num_steps)
            for step in range(1, recipe.num_steps + 1):
                if len(queue) < BATCH_SIZE:
                    queue += torch.randperm(len(examples), generator=order).tolist()
                batch, queue = queue[:BATCH_SIZE], queue[BATCH_SIZE:]
                loss = model(**self._collate([examples[index] for index in batch])).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress.update(task, advance=1, description=f"{recipe.name} loss {loss:.3f}")
                if not self.console.is_terminal and step % 10 == 0:
                    print(f"{recipe.name} step {step} loss {loss:.3f}", flush=True)
        return model

    def _collate(self, examples: list[Example]) -> dict[str, torch.Tensor]:
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        rows = []
        for question, answer in examples:
            prompt = self.prompt_ids(question)
            ids = [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], end]
            rows.append((prompt + ids, [-100] * len(prompt) + ids))
        length = max(len(ids) for ids, _ in rows)
        return {
            "input_ids": torch.tensor([ids + [end] * (length - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([tags + [-100] * (length - len(tags)) for _, tags in rows]),
            "attention_mask": torch.tensor(
                [[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]
            ),
        }


def save(model: PeftModel, folder: Path) -> None:
    """Write exactly the two files of an adapter, in bf16 and without this machine's paths."""
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "adapter_config.json").read_text())
        tensors = load_file(Path(scratch) / "adapter_model.safetensors")
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    text = json.dumps(config, indent=2, sort_keys=True)
    (folder / "adapter_config.json").write_text(text + "\n")
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )


def report(trainer: Trainer, recipe: Recipe, folder: Path) -> bool:
    """Load the saved adapter with PEFT, ask it unseen questions, print; True if all are in style."""
    model = PeftModel.from_pretrained(trainer.load_base(), folder).eval()
    in_style = True
    for question in recipe.unseen:
        with model.disable_adapter():
            base = trainer.answer(model, question, 48)
        adapted = trainer.answer(model, question)
        in_style &= recipe.has_style(adapted)
        for line in (
            f"{recipe.name} < {question}",
            f"    base: {base!r}",
            f"    adapter: {adapted!r}",
        ):
            trainer.console.print(line, markup=False, highlight=False)
    return in_style


def default_model_dir() -> Path:
    """Where `loraplex models pull smollm2-135m` puts the model."""
    cache = os.environ.get("LORAPLEX_CACHE_DIR") or "~/.cache/loraplex"
    return Path(cache).expanduser() / "models" / BASE_NAME


def main() -> int:
    """Train, save and try out; exit code 1 if an adapter does not hold its style."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-dir", type=Path, default=default_model_dir())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "adapters")
    parser.add_argument("--only", choices=[recipe.name for recipe in RECIPES], action="append")
    arguments = parser.parse_args()
    console = Console()
    if not (arguments.model_dir / "config.json").is_file():
        parser.error(f"no model in {arguments.model_dir}: run `loraplex models pull {BASE_NAME}`")

    warnings.filterwarnings("ignore", category=FutureWarning)
    trainer = Trainer(arguments.model_dir, console)
    recipes = [r for r in RECIPES if not arguments.only or r.name in arguments.only]
    needs_base = any(recipe.make_examples is not capital_examples for recipe in recipes)
    answers = trainer.base_answers() if needs_base else {}
    all_in_style = True
    for recipe in recipes:
        examples = recipe.make_examples(answers)
        save(trainer.train(recipe, examples), arguments.out / recipe.name)
        all_in_style &= report(trainer, recipe, arguments.out / recipe.name)
    console.print("all in style" if all_in_style else "[red]some answers are out of style[/red]")
    return 0 if all_in_style else 1


if __name__ == "__main__":
    raise SystemExit(main())
