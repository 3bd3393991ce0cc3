{#-
    A name under `meta.lakehouse_patterns` that is misspelt or stands in the wrong place would be ignored silently,
    or found after other models have run: the package's on-run-start hook looks at every node before anything runs.
-#}

{% macro check_pattern_options() %}
    {#- The package's on-run-start hook. -#}
    {%- if execute -%}
        {%- do lakehouse_patterns._require_own_materializations() -%}
        {%- for node in graph.nodes.values() | list + graph.sources.values() | list -%}
            {%- do lakehouse_patterns.check_options_of(node) -%}
            {%- if lakehouse_patterns.options_of(node, 'merger') is not none -%}
                {%- do lakehouse_patterns._merger_require_dispatch(node) -%}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{% endmacro %}


{% macro _require_own_materializations() %}
    {#- dbt takes a materialization of the root project before one of a package that has the same name. -#}
    {%- set used = graph.nodes.values() | map(attribute='config.materialized') | list -%}
    {%- for name in lakehouse_patterns.pattern_keys().values() if name in used and name not in [none, 'incremental'] -%}
        {%- for macro in ['materialization_' ~ name ~ '_spark', 'materialization_' ~ name ~ '_default'] -%}
            {%- do lakehouse_patterns.require(
                project_name == 'lakehouse_patterns' or macro not in context.get(project_name, {}),
                'the project ' ~ project_name ~ " has a materialization '" ~ name
                ~ "', which dbt runs in place of that of lakehouse_patterns: rename it"
            ) -%}
        {%- endfor -%}
    {%- endfor -%}
{% endmacro %}


{% macro check_options_of(node) %}
    {%- set meta = node.config.get('meta') or {} -%}
    {%- set keys = lakehouse_patterns.pattern_keys() -%}
    {%- set names = keys | list + keys.values() | reject('in', [none, 'incremental']) | list -%}
    {%- set names = names | unique | list -%}
    {%- for name in meta if name != 'lakehouse_patterns' -%}
        {#- Comparing letters costs more than their number. -#}
        {%- set is_near = 15 <= name | string | length <= 21
            and lakehouse_patterns.spelling_distance(name | string, 'lakehouse_patterns') <= 3 -%}
        {%- do lakehouse_patterns.require(
            not is_near,
            'meta of ' ~ node.name ~ " has '" ~ name ~ "': write lakehouse_patterns"
        ) -%}
    {%- endfor -%}
    {%- set given = meta.get('lakehouse_patterns') or {} -%}
    {%- do lakehouse_patterns.require(
        given is mapping,
        'meta.lakehouse_patterns of ' ~ node.name ~ ' must map patterns to their options, got ' ~ given
    ) -%}
    {%- for name in given -%}
        {%- do lakehouse_patterns.require(
            name in names,
            'meta.lakehouse_patterns of ' ~ node.name ~ " has no pattern '" ~ name ~ "'; "
            ~ lakehouse_patterns.advice_for_key(name, names)
        ) -%}
        {%- set pattern = name if name in keys else lakehouse_patterns.names_of_pattern(name)
            | select('in', keys | list) | first -%}
        {%- set needed = keys[pattern] -%}
        {%- do lakehouse_patterns.require(
            needed is none or given[name] is none or node.config.materialized == needed,
            'meta.lakehouse_patterns.' ~ name ~ ' of ' ~ node.name ~ " needs materialized='" ~ needed ~ "', got '"
            ~ node.config.materialized ~ "'"
        ) -%}
        {%- do lakehouse_patterns.require_proved_adapter('meta.lakehouse_patterns.' ~ name ~ ' of ' ~ node.name) -%}
        {%- do lakehouse_patterns._check_names_of_options(
            'meta.lakehouse_patterns.' ~ name ~ ' of ' ~ node.name, given[name] if given[name] is not none else {},
            lakehouse_patterns.pattern_options()[pattern]
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _check_names_of_options(where, given, names) %}
    {%- do lakehouse_patterns.require(given is mapping, where ~ ' must map options to their values, got ' ~ given) -%}
    {%- for option in given -%}
        {%- do lakehouse_patterns.require(
            option in names, where ~ " has no option '" ~ option ~ "'; " ~ lakehouse_patterns.advice_for_name(option, names)
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro advice_for_key(name, names) %}
    {#- An option that stands one level too high belongs under its pattern; anything else is compared by letters. -#}
    {%- set holders = [] -%}
    {%- for pattern, options in lakehouse_patterns.pattern_options().items() if name in options -%}
        {%- do holders.append(pattern) -%}
    {%- endfor -%}
    {%- if holders -%}
        {{ return('it is an option of ' ~ (holders | join(' and ')) ~ ': indent it under that name') }}
    {%- endif -%}
    {{ return(lakehouse_patterns.advice_for_name(name, names)) }}
{% endmacro %}


{% macro advice_for_name(name, names) %}
    {{ return(
        "the nearest is '" ~ lakehouse_patterns.nearest_name(name | string, names) ~ "'; allowed: " ~ (names | join(', '))
    ) }}
{% endmacro %}


{% macro nearest_name(name, names) %}
    {%- set found = [] -%}
    {%- for known in names -%}
        {%- do found.append([lakehouse_patterns.spelling_distance(name, known), known]) -%}
    {%- endfor -%}
    {{ return((found | sort | first)[1]) }}
{% endmacro %}


{% macro spelling_distance(one, other) %}
    {#- The fewest letters to insert, drop or replace that make one name of the other (Levenshtein). -#}
    {%- set rows = [range(other | length + 1) | list] -%}
    {%- for letter in one | lower -%}
        {%- set before, row = rows[-1], [loop.index] -%}
        {%- for known in other | lower -%}
            {%- do row.append([
                before[loop.index0] + (0 if letter == known else 1), before[loop.index] + 1, row[-1] + 1
            ] | min) -%}
        {%- endfor -%}
        {%- do rows.append(row) -%}
    {%- endfor -%}
    {{ return(rows[-1][-1]) }}
{% endmacro %}
