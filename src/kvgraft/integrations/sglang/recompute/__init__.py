"""Forward passes of our own between SGLang's: look at what the question attends to, compute single reused tokens again."""
