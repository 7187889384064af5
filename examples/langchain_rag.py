"""Use the embedded engine as a model of LangChain, in a chain that retrieves passages.

    pip install '.[torch]' langchain-core
    python examples/langchain_rag.py "Which function returns the n largest elements?" "Which one returns the smallest?"

graft-tiny, the default model, comes with kvgraft and knows code better than answers; `--model` takes any other.
"""

from __future__ import annotations

import argparse
import heapq
import inspect
import random
import shutil
import textwrap
from typing import TYPE_CHECKING, Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnableLambda

from kvgraft import LLM, SamplingParams

if TYPE_CHECKING:
    from langchain_core.runnables import Runnable

FUNCTIONS = (
    heapq.nlargest,
    heapq.merge,
    heapq.nsmallest,
    textwrap.wrap,
    textwrap.dedent,
    shutil.copytree,
    shutil.which,
)
TEMPLATE = "{passages}\n\nQuestion: {question}\nAnswer:"


class Graft(BaseLLM):
    """A model of LangChain that runs in this process and reuses any text that it has read.

    The report of what was reused stands in the `generation_info` of each generation.
    """

    engine: Any
    max_new_tokens: int = 24

    @property
    def _llm_type(self) -> str:
        return "kvgraft"

    def _generate(self, prompts: list[str], stop: list[str] | None = None, *_: object, **__: object) -> LLMResult:
        sampling = SamplingParams(self.max_new_tokens, stop=tuple(stop or ()))
        outputs = self.engine.generate(prompts, sampling)
        return LLMResult(generations=[[Generation(text=o.text, generation_info={"report": o.report})] for o in outputs])


class PrintReuse(BaseCallbackHandler):
    """Print what was reused for every prompt."""

    def on_llm_end(self, response: LLMResult, **_: object) -> None:
        """Read the reports."""
        for (generation,) in response.generations:
            report = generation.generation_info["report"]
            print(f"{report.num_tokens} prompt tokens, {report.exact_tokens} exact, {report.shifted_tokens} shifted")


def rag_chain(model: BaseLLM) -> Runnable[str, str]:
    """Return a chain from a question to its answer; the passages come in another order each time, as a search gives them."""
    sources = [inspect.getsource(function) for function in FUNCTIONS]

    def retrieve(question: str) -> dict[str, str]:
        return {"passages": "\n\n".join(random.sample(sources, 5)), "question": question}

    return RunnableLambda(retrieve) | PromptTemplate.from_template(TEMPLATE) | model


def main() -> None:
    """Answer the questions one after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--model", default="graft-tiny")
    args = parser.parse_args()
    chain = rag_chain(Graft(engine=LLM(args.model)))
    for question in args.questions:
        answer = chain.invoke(question, {"callbacks": [PrintReuse()]})
        print(f"{question}\n  {' '.join(answer.split())}\n")


if __name__ == "__main__":
    main()
