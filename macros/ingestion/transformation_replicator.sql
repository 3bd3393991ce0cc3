{#-
    Transformation Replicator in SQL: the select list of a replica that holds only the columns that may leave.

    The contract is dbt's YAML of the source's columns (or the argument `contract`, in the form of
    python_jobs/ingestion/data_contract.py, whose rules these macros share). An unlisted column is withheld, and so is a
    column tagged `pii` without a `transform`. Nested fields are listed as columns with Delta's names: `address.city`,
    `devices.element.version`, `settings.value.theme`.

    When the relation exists, its columns are compared with the contract while the model is compiled. The SQL names each
    selected column, so that columns added after the compilation are withheld too.
-#}

{% macro transformation_replicator(relation, contract=none, on_unknown='fail') %}
    {{ return(adapter.dispatch('transformation_replicator', 'lakehouse_patterns')(relation, contract, on_unknown)) }}
{% endmacro %}

{% macro default__transformation_replicator(relation, contract, on_unknown) %}
    {%- do lakehouse_patterns.require_one_of('on_unknown', on_unknown, ['fail', 'drop']) -%}
    {%- if not execute -%}
        {{ return('*') }}
    {%- endif -%}
    {%- do lakehouse_patterns._replica_require_model() -%}
    {%- set root = lakehouse_patterns._replica_contract(relation, contract) -%}
    {%- set unknown = lakehouse_patterns._replica_unknown(relation, root) -%}
    {%- if unknown and on_unknown == 'drop' -%}
        {%- do log('withheld from the replica of ' ~ relation ~ ', not listed: ' ~ unknown | join(', '), info=true) -%}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        not unknown or on_unknown == 'drop',
        'the contract of ' ~ relation ~ " doesn't list " ~ (unknown | join(', '))
        ~ ": list what may leave, tag what may not, or withhold it with on_unknown='drop'"
    ) -%}
    {%- set columns = [] -%}
    {%- for node in root.children.values() if lakehouse_patterns._replica_leaves(node) -%}
        {%- set quoted = adapter.quote(node.name) -%}
        {%- do columns.append(lakehouse_patterns._replica_expression(node, quoted, 0) ~ ' as ' ~ quoted) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(columns, 'by the contract of ' ~ relation ~ ' nothing may leave') -%}
    {{ return(columns | join(',\n    ')) }}
{% endmacro %}

{% macro transformation_replicator_purge() %}
    {{ return(adapter.dispatch('transformation_replicator_purge', 'lakehouse_patterns')()) }}
{% endmacro %}

{% macro default__transformation_replicator_purge() %}
    {#- Post-hook: remove the files of older versions, which may hold columns that were reclassified later. -#}
    {%- if execute -%}
        {%- do run_query('set spark.databricks.delta.retentionDurationCheck.enabled = false') -%}
        {%- do run_query('vacuum ' ~ this ~ ' retain 0 hours') -%}
        {%- do run_query('reset spark.databricks.delta.retentionDurationCheck.enabled') -%}
    {%- endif -%}
{% endmacro %}

{% test no_sensitive_columns(model, replica_of, contract=none) %}
    {#- One row for each column or field of the model that the contract of `replica_of` tags but doesn't transform. -#}
    {%- set leaked = [] -%}
    {%- if execute -%}
        {%- set root = lakehouse_patterns._replica_contract(replica_of, contract) -%}
        {%- set withheld = [] -%}
        {%- for path, node in lakehouse_patterns._replica_paths(root, '') if node.sensitive and not node.transform -%}
            {%- do withheld.append(path | lower) -%}
        {%- endfor -%}
        {%- for name, type in lakehouse_patterns.column_types(model).items() -%}
            {%- for path in lakehouse_patterns._replica_type_paths(name, type) if path | lower in withheld -%}
                {%- do leaked.append(path) -%}
            {%- endfor -%}
        {%- endfor -%}
    {%- endif -%}
    {%- for path in leaked %}
    select {{ lakehouse_patterns.text_literal(path) }} as column_name
    {{ 'union all' if not loop.last }}
    {%- else %}
    select 'none' as column_name where false
    {%- endfor %}
{% endtest %}


{#- The contract: a tree of {name, listed, sensitive, transform, keys, children} -#}

{% macro _replica_require_model() %}
    {%- if model is defined and model.resource_type == 'model' and config.get('file_format') == 'delta'
        and config.get('materialized') not in ['view', 'ephemeral'] -%}
        {%- do lakehouse_patterns.require(
            (config.get('tblproperties') or {}).get('delta.dataSkippingNumIndexedCols') | string == '0',
            'a replica needs tblproperties={\'delta.dataSkippingNumIndexedCols\': \'0\'}: statistics would keep values '
            ~ 'in its log after they are withheld'
        ) -%}
    {%- endif -%}
{% endmacro %}

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


{#- The check against the relation -#}

{% macro _replica_unknown(relation, root) %}
    {#- The relation's columns and fields that the contract doesn't list; none for an absent relation. -#}
    {#- dbt's cache of relations isn't used, because it lacks relations that other programs created later. -#}
    {%- set fields = lakehouse_patterns.column_types(relation).items() | list -%}
    {%- if not fields -%}
        {{ return([]) }}
    {%- endif -%}
    {{ return(lakehouse_patterns._replica_compare(root, fields, '') | sort) }}
{% endmacro %}

{% macro _replica_compare(node, fields, prefix) %}
    {%- set unknown, types = [], {} -%}
    {%- for name, type in fields -%}
        {%- do lakehouse_patterns.require(
            name | lower not in types, prefix ~ name ~ ' is there twice in the source, spelled in different cases'
        ) -%}
        {%- do types.update({name | lower: type}) -%}
        {%- if name | lower not in node.children -%}
            {%- do unknown.append(prefix ~ name) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- for name, child in node.children.items() -%}
        {%- do lakehouse_patterns.require(
            name in types,
            'the contract names ' ~ prefix ~ child.name ~ ", which the source doesn't have; it has "
            ~ (fields | map('first') | join(', '))
        ) -%}
        {%- do unknown.extend(lakehouse_patterns._replica_compare_type(child, types[name], prefix ~ child.name)) -%}
    {%- endfor -%}
    {{ return(unknown) }}
{% endmacro %}

{% macro _replica_compare_type(node, type, path) %}
    {%- if not node.children and node['keys'] is none and not lakehouse_patterns._replica_leaves(node) -%}
        {{ return([]) }}
    {%- endif -%}
    {%- do lakehouse_patterns.require(
        not node.transform or lakehouse_patterns._replica_is_atomic(type),
        path ~ ' is a ' ~ type ~ ': the contract can only transform what is in it'
    ) -%}
    {%- set inner = type[type.find('<') + 1:-1] -%}
    {%- if type.startswith('struct<') -%}
        {%- do lakehouse_patterns.require(
            node.children, path ~ ' is a struct: the contract must list its fields, such as ' ~ path ~ '.name'
        ) -%}
        {{ return(lakehouse_patterns._replica_compare(node, lakehouse_patterns._replica_fields(type), path ~ '.')) }}
    {%- elif type.startswith('array<') -%}
        {%- if not node.children and lakehouse_patterns._replica_is_atomic(inner) -%}
            {{ return([]) }}
        {%- endif -%}
        {%- do lakehouse_patterns.require(
            node.children | list == ['element'],
            path ~ ' is an array: the contract must list its elements, as ' ~ path ~ '.element'
        ) -%}
        {{ return(lakehouse_patterns._replica_compare_type(node.children.element, inner, path ~ '.element')) }}
    {%- elif type.startswith('map<') -%}
        {%- do lakehouse_patterns.require(
            node['keys'] is not none, path ~ ' is a map: the contract must list the keys that may leave, as keys: […]'
        ) -%}
        {%- set value = (lakehouse_patterns._replica_split(inner))[1:] | join(',') -%}
        {%- do lakehouse_patterns.require(
            lakehouse_patterns._replica_is_atomic(lakehouse_patterns._replica_split(inner)[0]),
            path ~ " is a map whose keys are no texts or numbers: it can't be replicated"
        ) -%}
        {%- do lakehouse_patterns.require(
            node.children | list == ['value']
            or (not node.children and lakehouse_patterns._replica_is_atomic(value)),
            path ~ ' is a map: the contract must list the fields of its values, as ' ~ path ~ '.value'
        ) -%}
        {%- if node.children -%}
            {{ return(lakehouse_patterns._replica_compare_type(node.children.value, value, path ~ '.value')) }}
        {%- endif -%}
    {%- else -%}
        {%- do lakehouse_patterns.require(
            not node.children and node['keys'] is none,
            path ~ ' is a ' ~ type ~ ': it has no fields that the contract could list'
        ) -%}
        {%- do lakehouse_patterns.require(
            type != 'variant', path ~ " is a variant, which may hold anything: it can't be replicated"
        ) -%}
    {%- endif -%}
    {{ return([]) }}
{% endmacro %}

{% macro _replica_is_atomic(type) %}
    {{ return('<' not in type and type != 'variant') }}
{% endmacro %}

{% macro _replica_fields(type) %}
    {#- `struct<a:int,b:array<string>>` as [('a', 'int'), ('b', 'array<string>')]. -#}
    {%- set fields = [] -%}
    {%- for field in lakehouse_patterns._replica_split(type[7:-1]) if field -%}
        {%- do fields.append((field[:field.find(':')], field[field.find(':') + 1:])) -%}
    {%- endfor -%}
    {{ return(fields) }}
{% endmacro %}

{% macro _replica_split(text) %}
    {#- Split at the commas outside brackets. -#}
    {%- set parts, state = [], namespace(depth=0, part='') -%}
    {%- for character in text -%}
        {%- set state.depth = state.depth + (1 if character in '<(' else -1 if character in '>)' else 0) -%}
        {%- if character == ',' and state.depth == 0 -%}
            {%- do parts.append(state.part) -%}
            {%- set state.part = '' -%}
        {%- else -%}
            {%- set state.part = state.part ~ character -%}
        {%- endif -%}
    {%- endfor -%}
    {{ return(parts + [state.part]) }}
{% endmacro %}

{% macro _replica_type_paths(path, type) %}
    {#- The paths of a column and of all fields in it. -#}
    {%- set paths = [path] -%}
    {%- if type.startswith('struct<') -%}
        {%- for name, inner in lakehouse_patterns._replica_fields(type) -%}
            {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.' ~ name, inner)) -%}
        {%- endfor -%}
    {%- elif type.startswith('array<') -%}
        {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.element', type[6:-1])) -%}
    {%- elif type.startswith('map<') -%}
        {%- set value = (lakehouse_patterns._replica_split(type[4:-1]))[1:] | join(',') -%}
        {%- do paths.extend(lakehouse_patterns._replica_type_paths(path ~ '.value', value)) -%}
    {%- endif -%}
    {{ return(paths) }}
{% endmacro %}


{#- The SQL -#}

{% macro _replica_expression(node, value, depth) %}
    {#- A value reduced to the fields that may leave; NULL stays NULL. -#}
    {%- set children = [] -%}
    {%- for child in node.children.values() if lakehouse_patterns._replica_leaves(child) -%}
        {%- do children.append(child) -%}
    {%- endfor -%}
    {%- if node['keys'] is not none -%}
        {%- set names = [] -%}
        {%- for key in node['keys'] -%}
            {%- do names.append(lakehouse_patterns.text_literal(key)) -%}
        {%- endfor -%}
        {%- set k, v = 'k' ~ depth, 'v' ~ depth -%}
        {%- set arguments = '(' ~ k ~ ', ' ~ v ~ ') -> ' -%}
        {%- set value = 'map_filter(' ~ value ~ ', ' ~ arguments ~ 'string(' ~ k ~ ') in (' ~ names | join(', ') ~ '))' -%}
        {%- if children -%}
            {%- set inner = lakehouse_patterns._replica_expression(children[0], v, depth + 1) -%}
            {%- set value = 'transform_values(' ~ value ~ ', ' ~ arguments ~ inner ~ ')' -%}
        {%- endif -%}
        {{ return(value) }}
    {%- elif node.children | list == ['element'] -%}
        {%- set e = 'e' ~ depth -%}
        {{ return(
            'transform(' ~ value ~ ', ' ~ e ~ ' -> '
            ~ lakehouse_patterns._replica_expression(children[0], e, depth + 1) ~ ')'
        ) }}
    {%- elif node.children -%}
        {%- set fields = [] -%}
        {%- for child in children -%}
            {%- set field = value ~ '.' ~ adapter.quote(child.name) -%}
            {%- do fields.append(
                lakehouse_patterns.text_literal(child.name) ~ ', '
                ~ lakehouse_patterns._replica_expression(child, field, depth)
            ) -%}
        {%- endfor -%}
        {{ return('case when ' ~ value ~ ' is not null then named_struct(' ~ fields | join(', ') ~ ') end') }}
    {%- elif node.transform -%}
        {{ return(lakehouse_patterns._replica_transformed(node.transform[0], node.transform[1], value)) }}
    {%- endif -%}
    {{ return(value) }}
{% endmacro %}

{% macro _replica_transformed(kind, argument, value) %}
    {%- set text = 'string(' ~ value ~ ')' -%}
    {%- if kind == 'substring' -%}
        {{ return('substring(' ~ text ~ ', ' ~ argument ~ ')') }}
    {%- elif kind == 'constant' -%}
        {{ return(
            'case when ' ~ value ~ ' is not null then ' ~ lakehouse_patterns.text_literal(argument) ~ ' end'
        ) }}
    {%- endif -%}
    {#-
        HMAC-SHA-256. The executor that holds the row looks up the key, so that compiled SQL, plans and logs hold only
        the key's name. reflect returns the text 'null' for a variable that isn't set.
    -#}
    {%- set key = "reflect('java.lang.System', 'getenv', '" ~ argument ~ "')" -%}
    {{ return(
        'case when ' ~ value ~ ' is null then null when ' ~ key ~ " in ('null', '') then "
        ~ "raise_error('the environment variable " ~ argument ~ ", which holds the key of a keyed_hash, is not set') "
        ~ "else reflect('org.apache.commons.codec.digest.HmacUtils', 'hmacSha256Hex', " ~ key ~ ', ' ~ text ~ ') end'
    ) }}
{% endmacro %}
