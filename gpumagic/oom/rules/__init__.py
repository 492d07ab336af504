"""Pure rules: facts in, ranked suggestions out; one small file a family of fixes."""
