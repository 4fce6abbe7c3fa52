# The two commands of the README, and what developers run. Each prints a line a phase and keeps a log.
.PHONY: demo test soak eval format tidy clean

demo:
	@bash scripts/demo.sh

test:
	@bash scripts/test.sh

# Long runs; CI takes a short cut of each.
soak:
	@bash scripts/soak.sh

eval:
	@bash scripts/eval.sh

format:
	@clang-format-14 -i $$(git ls-files 'src/*.h' 'src/*.cc' 'src/*.cu' 'src/*.cuh')

tidy:
	@bash scripts/tidy.sh

clean:
	@rm -rf build out
