{#- The contract: a tree of {name, listed, sensitive, transform, keys, children}. -#}

{% macro _replica_contract(relation, contract) %}
    {%- set entries = contract if contract is not none else lakehouse_patterns._replica_entries(relation) -%}
    {%- do lakehouse_patterns.require(
        entries, 'there is no contract of ' ~ relation ~ ': describe its columns in a YAML file, or pass contract'
    ) -%}
    {%- set root = {'name': '', 'children': {}} -%}
    {%- for entry in entries -%}
        {%- set node = namespace(it=root) -%}
        {%- for part in entry.name.split('.') -%}
            {%- set node.it = node.it.children.setdefault(part | lower, {
                'name': part, 'listed': false, 'sensitive': false, 'transform': none, 'keys': none, 'children': {}
            }) -%}
        {%- endfor -%}
        {%- do lakehouse_patterns.require(
            not node.it.listed, 'the contract of ' ~ relation ~ ' lists ' ~ entry.name ~ " twice (case doesn't count)"
        ) -%}
        {%- do node.it.update({
            'listed': true,
            'sensitive': 'pii' in (entry.tags or []) | map('lower') | list,
            'transform': lakehouse_patterns._replica_transform(entry),
            'keys': entry['keys'] if 'keys' in entry else none
        }) -%}
    {%- endfor -%}
    {%- for path, node in lakehouse_patterns._replica_paths(root, '') if node.children -%}
        {%- do lakehouse_patterns.require(
            not node.sensitive and not node.transform and (not node.listed or node['keys'] is not none),
            path ~ ' has fields in the contract of ' ~ relation ~ ': list, tag and transform the fields only'
        ) -%}
    {%- endfor -%}
    {{ return(root) }}
{% endmacro %}

{% macro _replica_entries(relation) %}
    {#- The columns of a relation's model, source, seed or snapshot, as in its YAML. -#}
    {%- set entries = [] -%}
    {%- for node in graph.nodes.values() | list + graph.sources.values() | list
        if node.resource_type in ['model', 'source', 'seed', 'snapshot']
        and (node.database or '') | lower == (relation.database or '') | lower
        and node.schema | lower == relation.schema | lower
        and (node.identifier if node.resource_type == 'source' else node.alias) | lower == relation.identifier | lower -%}
        {%- for column in node.columns.values() -%}
            {%- set meta = dict(column.meta or {}, **((column.config or {}).meta or {})) -%}
            {%- set options = (meta.lakehouse_patterns or {}).transformation_replicator or {} -%}
            {%- do lakehouse_patterns.require_known_keys(
                'transformation_replicator of column ' ~ column.name, options, ['transform', 'keys']
            ) -%}
            {%- set tags = (column.tags or []) + ((column.config or {}).tags or []) + (['pii'] if meta.pii else []) -%}
            {%- do entries.append(dict(options, name=column.name, tags=tags)) -%}
        {%- endfor -%}
    {%- endfor -%}
    {{ return(entries) }}
{% endmacro %}

{% macro _replica_transform(entry) %}
    {%- set given = entry.transform -%}
    {%- if not given -%}
        {{ return(none) }}
    {%- endif -%}
    {%- set kind, argument = (given.items() | first) if given is mapping else (none, none) -%}
    {%- do lakehouse_patterns.require(
        given is mapping and given | length == 1 and kind in ['keyed_hash', 'substring', 'constant'],
        'transform of ' ~ entry.name ~ ' must be one of keyed_hash, substring, constant with its argument, got '
        ~ given
    ) -%}
    {%- set needs = {
        'keyed_hash': 'the name of the environment variable that holds the key',
        'substring': 'the position of the first character kept, from 1',
        'constant': 'a text'
    } -%}
    {%- do lakehouse_patterns.require(
        (kind == 'keyed_hash' and modules.re.fullmatch('[A-Za-z_]\\w*', argument | string))
        or (kind == 'substring' and argument is integer and argument >= 1)
        or (kind == 'constant' and argument is string),
        'transform of ' ~ entry.name ~ ': ' ~ kind ~ ' takes ' ~ needs[kind]
    ) -%}
    {{ return([kind, argument]) }}
{% endmacro %}

{% macro _replica_leaves(node) %}
    {%- if not node.children -%}
        {{ return(node.listed and (not node.sensitive or node.transform is not none)) }}
    {%- endif -%}
    {%- set leaving = [] -%}
    {%- for child in node.children.values() if lakehouse_patterns._replica_leaves(child) -%}
        {%- do leaving.append(child) -%}
    {%- endfor -%}
    {{ return(leaving | length > 0) }}
{% endmacro %}

{% macro _replica_paths(node, prefix) %}
    {%- set paths = [] -%}
    {%- for child in node.children.values() -%}
        {%- do paths.append((prefix ~ child.name, child)) -%}
        {%- do paths.extend(lakehouse_patterns._replica_paths(child, prefix ~ child.name ~ '.')) -%}
    {%- endfor -%}
    {{ return(paths) }}
{% endmacro %}
