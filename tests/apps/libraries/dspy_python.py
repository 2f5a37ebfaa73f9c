"""DSPy: raw calls and its JSON adapter."""

import dspy
from checks import MODEL, SAY, URL, check

lm = dspy.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", cache=False, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Question(dspy.Signature):
    """Answer the question."""

    question: str = dspy.InputField()
    number: int = dspy.OutputField()


asked = 'DO json {"number": 9}'
check("raw", lambda: lm(SAY)[0], "blue")
check("JSONAdapter", lambda: str(dspy.Predict(Question)(question=asked).number), "9", scripted=True)
