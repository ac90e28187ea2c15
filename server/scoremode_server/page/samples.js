// Texts to begin with.

export const SAMPLES = {
  "Prose": `The lighthouse keeper counted the ships every evening, as his mother had done before him. There were seven \
on the first night of the storm, and six on the second. On the third night he lit the lamp, climbed down to the harbour \
and asked the fishermen which of them had stayed at home.

“Nobody,” said the oldest. “We thought that you had put out the light.”
`,
  "A factual paragraph": `The capital of France is Paris. It lies on the Seine, and some two million people live in it. The \
Eiffel Tower was built for the World's Fair of 1889, a hundred years after the beginning of the French Revolution. At 330 \
meters it was the tallest building in the world until 1930. The capital of Germany is Berlin, and the capital of \
Australia is not Sydney but Canberra.
`,
  "Python": `def fibonacci(n):
    """The first n Fibonacci numbers."""
    numbers = []
    a, b = 0, 1
    while len(numbers) < n:
        numbers.append(a)
        a, b = b, a + b
    return numbers


if __name__ == "__main__":
    print(fibonacci(10))
`,
  "Arabic, Hebrew, Japanese": `القاهرة هي عاصمة مصر، وهي أكبر مدينة في العالم العربي. يمر بها نهر النيل.

ירושלים היא עיר עתיקה. The Hebrew word שלום means “peace”.

東京は日本の首都です。富士山は日本で一番高い山です。 🗻
`,
};
