#!/bin/sh
# A torchvision whose operators are for another build of torch cannot be imported; engines and transformers call none of them:
# tests/serving/fit_torchvision.sh PYTHON
"$1" -c "import torchvision" 2> /dev/null ||
    : > "$("$1" -c "import importlib.util as u; print(u.find_spec('torchvision').submodule_search_locations[0])")/_meta_registrations.py"
